"""Drawings of anything that can be drawn: for a terminal, a notebook, or a file."""

from ._draw import Drawing, draw

__all__ = ["Drawing", "draw"]
