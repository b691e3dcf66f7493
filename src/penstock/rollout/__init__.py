"""Penstock rollout."""
