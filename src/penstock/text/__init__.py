"""Penstock text."""
