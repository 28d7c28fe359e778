"""Drawings of anything that can be drawn: for a terminal, a notebook, or a file."""

from ._draw import Drawing, draw, html_of, write_text

__all__ = ["Drawing", "draw"]
