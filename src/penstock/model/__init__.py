"""Penstock model."""
