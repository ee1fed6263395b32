"""Audits: attacks on your own models and training runs. See README.md in this folder."""
