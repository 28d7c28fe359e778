"""Comparing two checkpoints, whatever their formats and layouts: keys, kinds, and every bit."""

from ._compare import CheckpointDifference, KindDifference, compare
from ._values import ValueDifference
