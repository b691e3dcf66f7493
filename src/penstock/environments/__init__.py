"""Penstock environments."""
