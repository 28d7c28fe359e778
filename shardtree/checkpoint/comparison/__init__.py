"""Comparing two checkpoints, whatever their formats and layouts: keys, kinds, and every bit."""

from .._differences import ValueDifference
from ._compare import CheckpointDifference, KindDifference, compare
