"""Traces of loading code: which elements of inputs become which elements of outputs, found in a run without data."""

from ..core.lazy import Box
from ._boxes import View, view_of
from ._differences import Difference
from ._local import Local, check_written, localized, transformed
from ._moves import Loop, Move, Moves
from ._problems import Problem, coverage
from ._steps import Computed, Constant, Kind
from ._text import axis_of, factored
from ._trace import Trace
from ._tracing import trace

__all__ = ["Box", "Difference", "Kind", "Move", "Moves", "Problem", "Trace", "trace"]
