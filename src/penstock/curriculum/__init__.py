"""Penstock curriculum."""
