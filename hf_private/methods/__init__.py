"""Gradient methods: what is released of a per-sample gradient, and how it becomes a gradient again."""
