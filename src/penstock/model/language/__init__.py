"""Language policies."""
