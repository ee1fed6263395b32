"""Attacks on our own models and runs."""
