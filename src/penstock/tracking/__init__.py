"""Penstock tracking."""
