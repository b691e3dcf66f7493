"""Penstock inference."""
