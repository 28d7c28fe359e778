"""Comparing two checkpoints, whatever their formats and layouts: keys, kinds, and every bit."""

from ._compare import CheckpointDifference as CheckpointDifference
from ._compare import KindDifference as KindDifference
from ._compare import compare as compare
from ._values import ValueDifference as ValueDifference
