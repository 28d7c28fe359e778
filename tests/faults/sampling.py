"""Which points of a fault matrix a run tries: a sample by a seed, which the head of pytest's report shows.

`.ci/run` draws another seed each time, so that runs together come by every point; SHARDTREE_FAULT_SEED repeats one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

import pytest

SEED = int(os.environ.get("SHARDTREE_FAULT_SEED", "0"))

Point = TypeVar("Point")

EXHAUSTIVE = pytest.mark.exhaustive


def sample(points: Sequence[Point], count: int, seed: int = SEED) -> list[Point]:
    """Return some of the points in their order, the first and the last among them."""
    if len(points) <= count:
        return list(points)
    between = Random(f"{seed} {len(points)}").sample(range(1, len(points) - 1), count - 2)
    return [points[number] for number in sorted([0, *between, len(points) - 1])]


def first(stride: int, seed: int = SEED) -> int:
    """Return the number that a walk over every so many calls begins with."""
    return seed % stride


def usually(points: Sequence[Point], count: int, seed: int = SEED) -> list[Any]:
    """Return all points as parameters, of which a usual run takes some; the others are for `-m exhaustive`."""
    chosen = Random(f"{seed} {len(points)}").sample(range(len(points)), count)
    return [
        point
        if number in chosen
        else pytest.param(*(point if isinstance(point, tuple) else (point,)), marks=EXHAUSTIVE)
        for number, point in enumerate(points)
    ]
