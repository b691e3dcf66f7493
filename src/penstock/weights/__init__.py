"""Penstock weights."""
