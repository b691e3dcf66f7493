"""Penstock learner."""
