"""Penstock replay."""
