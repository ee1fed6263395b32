"""Gradient methods: what is read from the book, clipped, noised and turned back into gradients. One file a method."""

from .full import Full, Method

__all__ = ["Full", "Method"]
