"""Penstock rundir."""
