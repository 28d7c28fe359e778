"""Fingerprints of tensors: each rank sums its own shards' contributions, and these sums add up to one number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
import torch

from ...errors import IntegrityError, error_text
from ..ambient import shielded
from ..geometry import group_sums
from ..layouts import ShardColumns, TensorKind, shard_columns, tensor_shards
from ..mapping import ShardedTensor, is_main_replica
from ._parts import ShardPiece, box_pieces, piece_total, shard_pieces
from ._sums import MODULUS, Words

Totals = Callable[[Iterable[ShardPiece]], Iterable[int]]
"""A function that maps `piece_total` over pieces, like `map` or a pool of threads."""


def _one_by_one(pieces: Iterable[ShardPiece]) -> Iterable[int]:
    return map(piece_total, pieces)


@dataclass(frozen=True, slots=True)
class PartialFingerprint:
    """The contribution of some shards of one tensor to its fingerprint.

    Attributes:
        kind: Dtype and global shape of the tensor.
        elements: Number of the shards' elements.
        total: Sum of the shards' contributions, modulo 2**64.
    """

    kind: TensorKind
    elements: int
    total: int


@shielded
def partial_fingerprints(tree: Any) -> dict[str, PartialFingerprint]:
    """Return the contribution of one rank's tree to the fingerprint of each tensor, by key.

    Only main replicas (``replica_id`` 0) count, so that over all ranks each element counts once. Ranks that share no
    process group can pickle these values and send them to the caller of `add_fingerprints`.

    Args:
        tree: Dicts, lists and tuples of shards and factories; other values don't count.

    Raises:
        IntegrityError: Two shards of one key differ in global shape, dtype or prepended axes.
        CheckpointingException: A shard has no tensor.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = torch.arange(4.0)
        >>> halves = [st.ShardedTensor.from_rank_offsets("w", half, (0, i, 2)) for i, half in enumerate(whole.chunk(2))]
        >>> of_halves = st.fingerprints.add_fingerprints(partial_fingerprints([half]) for half in halves)
        >>> of_halves == st.fingerprint([st.ShardedTensor.from_rank_offsets("w", whole)])
        True
    """
    return shard_parts(main_shards(tree))


def main_shards(tree: Any) -> tuple[ShardedTensor, ...]:
    """Return the main replicas among a tree's tensor shards, after applying factories.

    Examples:
        >>> import torch, shardtree as st
        >>> copies = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=number) for number in (0, 1)]
        >>> len(main_shards({"w": copies, "step": 1}))
        1
    """
    return tuple(shard for shard in tensor_shards(tree) if is_main_replica(shard.replica_id))


@shielded
def shard_totals(shards: Sequence[ShardedTensor], totals: Totals = _one_by_one) -> Words:
    """Return each shard's contribution to its tensor's fingerprint, modulo 2**64, uint64 (shards,).

    Args:
        shards: Shards with data.
        totals: Function that returns the sum (`piece_total`) of each piece; it may use threads.

    Examples:
        >>> import torch, shardtree as st
        >>> shard_totals([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2))]).size
        1
    """
    # The pieces of all shards are in one list, so that threads share one large shard as well as many small ones.
    pieces = [(number, piece) for number, shard in enumerate(shards) for piece in shard_pieces(shard)]
    sums = [0] * len(shards)
    for (number, _), total in zip(pieces, totals([piece for _, piece in pieces]), strict=True):
        sums[number] = (sums[number] + total) % MODULUS
    return np.array(sums, dtype=np.uint64)


@shielded
def shard_parts(shards: Sequence[ShardedTensor], totals: Totals = _one_by_one) -> dict[str, PartialFingerprint]:
    """Return the shards' contribution to the fingerprint of each tensor, by key; each replica is added.

    Args:
        shards: Shards with data.
        totals: Function that returns the sum (`piece_total`) of each piece; it may use threads.

    Raises:
        IntegrityError: Two shards of one key differ in global shape, dtype or prepended axes.

    Examples:
        >>> import torch, shardtree as st
        >>> shard_parts([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2))])["w"].elements
        6
    """
    return column_parts(shard_columns(shards), shard_totals(shards, totals))


@shielded
def box_part(
    kind: TensorKind, data: torch.Tensor, offset: Sequence[int], totals: Totals = _one_by_one
) -> PartialFingerprint:
    """Return the contribution of a box to the fingerprint of its tensor.

    Args:
        kind: Dtype and global shape of the tensor, prepended axes included.
        data: The box's elements.
        offset: The box's first index in the tensor, (axes,).
        totals: Function that returns the sum (`piece_total`) of each piece; it may use threads.

    Examples:
        >>> box_part(TensorKind(torch.int8, (4, 3), 0), torch.zeros(2, 3, dtype=torch.int8), (2, 0)).elements
        6
    """
    return PartialFingerprint(kind, data.numel(), sum(totals([*box_pieces(data, offset)])) % MODULUS)


def column_parts(columns: ShardColumns, totals: Words) -> dict[str, PartialFingerprint]:
    """Add up the shards' contributions for each tensor, and return the sums by key; each replica is added.

    Args:
        columns: Shards of any ranks.
        totals: Contribution of each shard, as from `shard_totals`, uint64 (shards,).

    Examples:
        >>> import torch, shardtree as st
        >>> shard = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2))
        >>> column_parts(st.layouts.shard_columns([shard]), np.array([5], dtype=np.uint64))["w"].total
        5
    """
    elements = group_sums(columns.key, columns.elements, len(columns.keys))
    sums = np.zeros(len(columns.keys), dtype=np.uint64)
    np.add.at(sums, columns.key, totals)
    rows = zip(columns.keys, columns.kinds, elements.tolist(), sums.tolist(), strict=True)
    return {key: PartialFingerprint(kind, count, total) for key, kind, count, total in rows}


def unlike_replicas(columns: ShardColumns, totals: Words) -> list[list[list[int]]]:
    """Return the groups of equal replicas, for each box whose replicas differ.

    Shards are replicas of each other if they have the same key and the same box, or flat range.

    Args:
        columns: Shards of all ranks, replicas included.
        totals: Contribution of each shard to its tensor's fingerprint, uint64 (shards,).

    Returns:
        A list of groups for each such box, the main replica's group first. A group is a list of rows of `columns`.

    Examples:
        >>> import torch, shardtree as st
        >>> copies = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=number) for number in (0, 1)]
        >>> own = [st.layouts.shard_columns([copy], rank) for rank, copy in enumerate(copies)]
        >>> columns = st.layouts.join_columns(own)
        >>> unlike_replicas(columns, np.array([5, 6], dtype=np.uint64))
        [[[0], [1]]]
    """
    places = (columns.key, *columns.offset.T, *columns.shape.T, columns.start, columns.stop)
    # Main replicas come first for each box: the others are compared with the replica that is saved.
    order = np.lexsort((columns.rank, ~columns.main, *places))
    new = np.any([column[order][1:] != column[order][:-1] for column in places], axis=0)
    first = np.maximum.accumulate(np.where(np.append(True, new), np.arange(len(order)), 0)) if len(order) else order
    unlike = totals[order] != totals[order[first]]
    by_place: dict[int, dict[int, list[int]]] = {place: {} for place in np.unique(first[unlike]).tolist()}
    for place, row in zip(first.tolist(), order.tolist(), strict=True):
        if place in by_place:
            by_place[place].setdefault(int(totals[row]), []).append(row)
    return [list(groups.values()) for groups in by_place.values()]


def add_fingerprints(parts: Iterable[Mapping[str, PartialFingerprint]]) -> dict[str, int]:
    """Return each tensor's fingerprint, from the contributions of all its shards.

    Args:
        parts: Contributions of any number of ranks, in any order.

    Raises:
        IntegrityError: The parts don't make up a whole tensor, or disagree about its dtype and global shape.

    Examples:
        >>> import torch, shardtree as st
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))
        >>> add_fingerprints([partial_fingerprints([half])])
        Traceback (most recent call last):
        ...
        shardtree.errors.IntegrityError: fingerprint: the parts do not make up whole tensors
          'w': 2 of 4 elements
          Pass the parts of all ranks, each once.
    """
    whole: dict[str, PartialFingerprint] = {}
    problems = {}
    for key, part in (item for mapping in parts for item in mapping.items()):
        before = whole.setdefault(key, PartialFingerprint(part.kind, 0, 0))
        # Prepended axes don't count, since they don't belong to the stored tensor.
        if (before.kind.dtype, before.kind.global_shape) != (part.kind.dtype, part.kind.global_shape):
            problems[key] = f"{before.kind} and {part.kind}"
        total = (before.total + part.total) % MODULUS
        whole[key] = replace(before, elements=before.elements + part.elements, total=total)
    for key, part in whole.items():
        # Elements are counted, since a sum that lacks a part looks like any other.
        count = prod(part.kind.global_shape)
        if part.elements != count:
            problems.setdefault(key, f"{part.elements} of {count} elements")
    if problems:
        raise IntegrityError(
            error_text(
                "fingerprint: the parts do not make up whole tensors",
                offenders=[f"{key!r}: {problem}" for key, problem in sorted(problems.items())],
                fix="Pass the parts of all ranks, each once.",
            )
        )
    return {key: tensor_fingerprint(key, whole[key].kind, whole[key].total) for key in sorted(whole)}


def tensor_fingerprint(key: str, kind: TensorKind, total: int) -> int:
    """Return a tensor's fingerprint: `total`, its elements' weighted sum, plus a hash of key, dtype and global shape.

    Examples:
        >>> import torch
        >>> kind = TensorKind(torch.float32, (4, 2), 0)
        >>> hex(tensor_fingerprint("w", kind, 0)), tensor_fingerprint("w", kind, 5) - tensor_fingerprint("w", kind, 0)
        ('0x8f21eb4f8711ed2c', 5)
    """
    text = json.dumps([key, str(kind.dtype).removeprefix("torch."), kind.global_shape], separators=(",", ":"))
    name = int.from_bytes(blake2b(text.encode("ascii"), digest_size=8).digest(), "little")
    return (name + total) % MODULUS
