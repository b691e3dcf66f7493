"""Penstock batch."""
