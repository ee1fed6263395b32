"""Bugs by the package that they are put into."""
