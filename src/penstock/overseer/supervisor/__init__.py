"""Keeping the components of a run alive."""
