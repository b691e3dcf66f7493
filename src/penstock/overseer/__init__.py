"""Penstock overseer."""
