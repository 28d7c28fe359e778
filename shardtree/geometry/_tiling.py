"""Whether boxes tile what is around them, each box looked at once: by a sum that hardly anything else adds up to."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ._boxes import Column

_Weights = NDArray[np.uint64]

_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts, and odd numbers with as many ones as zeros: those of SplitMix64, whose mixing this is."""

_MOST_AXES = 4
"""Half of all weights are even, and a product of many even numbers is zero modulo 2**64, whatever the boxes are."""


def tiled_groups(group: Column, offset: Column, shape: Column, groups: int) -> NDArray[np.bool_]:
    """Return which groups have boxes that tile the smallest box around them, without gap and without overlap.

    Each index of each axis has a weight that looks like chance, an element has the product of its indices' weights
    modulo 2**64, and a box the sum of its elements', which its corners tell. Boxes that tile another box have the same
    sum as that. Others have it with a chance of about 2**-60 for boxes that differ along one axis or two, and 2**-52
    for four: the difference is a polynomial of the weights that isn't zero. So a group that is said to tile can be
    taken to do so; any other has a gap or an overlap, or its boxes differ along more axes. The weights follow from all
    the boxes by a cryptographic hash, so that boxes can't be chosen to fit them.

    Args:
        group: the group that each box belongs to, from 0, int64 (boxes,).
        offset: int64 (boxes, axes).
        shape: int64 (boxes, axes); every box has elements.
        groups: how many there are; those without boxes count as tiled.

    Examples:
        >>> offset, shape = np.array([[0], [2], [0], [1]]), np.array([[2], [1], [1], [3]])
        >>> tiled_groups(np.array([0, 0, 1, 1]), offset, shape, 2).tolist()
        [True, True]
        >>> tiled_groups(np.array([0, 0, 0]), np.array([[0], [0], [2]]), np.ones((3, 1), int), 1).tolist()
        [False]

    References:
        G. L. Steele, D. Lea, C. H. Flood, Fast splittable pseudorandom number generators, 2014.
        J. T. Schwartz, Fast probabilistic algorithms for verification of polynomial identities, 1980.
        A. Fiat, A. Shamir, How to prove yourself, 1986.
    """
    empty, axes = np.bincount(group, minlength=groups) == 0, _telling_axes(offset, shape)
    if len(axes) > _MOST_AXES:
        return np.asarray(empty)
    boxes = blake2b(np.concatenate([group[:, None], offset, shape], axis=1, dtype=np.int64).data, digest_size=32)
    held, around = np.ones(len(group), dtype=np.uint64), np.ones(groups, dtype=np.uint64)
    for axis in axes:
        begin, end = offset[:, axis], offset[:, axis] + shape[:, axis]
        low, high = np.full(groups, np.iinfo(np.int64).max), np.full(groups, np.iinfo(np.int64).min)
        np.minimum.at(low, group, begin)
        np.maximum.at(high, group, end)
        seed = _seed(boxes.digest(), axis)
        held *= _weight(end, seed) - _weight(begin, seed)
        around *= _weight(high, seed) - _weight(low, seed)
    total = np.zeros(groups, dtype=np.uint64)
    np.add.at(total, group, held)
    return np.asarray((total == around) | empty)


def _telling_axes(offset: Column, shape: Column) -> list[int]:
    """Return the axes along which boxes differ, or all where they are few."""
    axes = range(offset.shape[1])
    if len(axes) <= _MOST_AXES:
        return list(axes)
    return [axis for axis in axes if any((column[:, axis] != column[:1, axis]).any() for column in (offset, shape))]


def _seed(boxes: bytes, axis: int) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(boxes + axis.to_bytes(8, "little"), digest_size=8).digest(), "little"))


def _weight(place: Column, seed: np.uint64) -> _Weights:
    """Return the weight of all indices before a place together: its bits, mixed."""
    mixed = place.astype(np.uint64)
    mixed += seed
    for shift, factor in _FACTORS:
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed
