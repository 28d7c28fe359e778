"""Factories like those of models: gated halves, transposed tensors, stacked layers; and strategies for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ..lenses import as_factory
from ..mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from ._bits import carried
from ._law_factory import stored_elements
from ._layout import cut
from ._layouts import layouts
from ._lens_cases import LENS_CASES
from ._tensors import PRINTABLE_DTYPES, random_bits

# Written as in Megatron-Core, with a build and a merge function, rather than as lenses: the laws of factories must hold
# for such ones too.


def glu(key: str, data: Any, rank: int = 0, ranks: int = 1, *, replica_id: ReplicaId = 0) -> ShardedTensorFactory:
    """Return the factory of a gated layer's weight, which stores both halves separately.

    Then the number of ranks may change. It also builds from flat ranges.

    Args:
        key: the tensor's name.
        data: gate rows above value rows, shape (2 * rows, ...).
        rank: the rank's number among those that share the rows.
        ranks: how many share them.
        replica_id: see ShardedTensor.

    Examples:
        >>> [shard.global_offset for shard in glu("w", torch.zeros(4, 3), 1, 2).build()]
        [(2, 0), (6, 0)]
    """
    whole = tuple(data.shape)
    half = (whole[0] // 2, *whole[1:])

    def build(key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> list[ShardedTensor]:
        cuts = [(0, rank + part * ranks, 2 * ranks) for part in range(2)]
        if flattened_range is None:
            rows = data.split(half[0]) if half[0] else (data, data)
            pairs = zip(rows, cuts, strict=True)
            return [ShardedTensor.from_rank_offsets(key, part, cut, replica_id=replica_id) for part, cut in pairs]
        return [
            ShardedTensor.from_rank_offsets_flat(
                key, data[taken], half, cut, flattened_range=inside, replica_id=replica_id
            )
            for cut, (taken, inside) in zip(cuts, _halves(flattened_range, torch.Size(half).numel()), strict=True)
        ]

    return ShardedTensorFactory(key, data, build, lambda parts: torch.cat(list(parts)), replica_id)


def _halves(flat: slice, volume: int) -> list[tuple[slice, slice]]:
    """Return, for each half, the slice of the flat data that belongs to it, and the corresponding slice of the half."""
    parts = []
    for begin in (0, volume):
        first, last = (min(max(at, begin), begin + volume) for at in (flat.start, flat.stop))
        parts.append((slice(first - flat.start, last - flat.start), slice(first - begin, last - begin)))
    return parts


def transposed(key: str, data: Any, *cuts: tuple[int, int, int], replica_id: ReplicaId = 0) -> ShardedTensorFactory:
    """Return the factory of a matrix that is stored transposed.

    Examples:
        >>> transposed("w", torch.zeros(2, 3)).build().global_shape
        (3, 2)
    """

    def build(key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data.transpose(0, 1), *cuts, replica_id=replica_id)

    return ShardedTensorFactory(key, data, build, lambda tensor: tensor.transpose(0, 1), replica_id)


def stacked(key: str, data: Any, first: int = 0, layers: int | None = None) -> ShardedTensorFactory:
    """Return the factory of stacked layers that are stored one by one, along an axis of the global tensor.

    Args:
        key: the tensor's name.
        data: shape (local layers, ...).
        first: the number of the first local layer.
        layers: of the whole model; the local ones by default.

    Examples:
        >>> [shard.global_offset for shard in stacked("w", torch.zeros(2, 3), first=1, layers=4).build()]
        [(1, 0), (2, 0)]
    """
    total = data.shape[0] if layers is None else layers

    def build(key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> list[ShardedTensor]:
        cuts = [(0, first + number, total) for number in range(data.shape[0])]
        return [
            ShardedTensor.from_rank_offsets(key, layer, cut, replica_id=replica_id, prepend_axis_num=1)
            for layer, cut in zip(data.unbind(0), cuts, strict=True)
        ]

    return ShardedTensorFactory(key, data, build, lambda loaded: torch.stack(list(loaded)))


KINDS: tuple[Callable[[str, torch.Tensor], ShardedTensorFactory], ...] = (glu, transposed, stacked)


def factories(*, dtype: SearchStrategy[torch.dtype] | None = None) -> SearchStrategy[ShardedTensorFactory]:
    """Return a strategy for factories: of the kinds above, and of every predefined lens on any box of a tensor.

    Elements that a lens doesn't store, such as padding, are zero in the tensors.

    Args:
        dtype: a strategy for dtypes; by default those that torch can print, so that failures can be shown.

    Examples:
        >>> from hypothesis import find
        >>> find(factories(), lambda factory: factory.data.numel() > 0).data.shape
        torch.Size([2, 1])
    """
    kinds = st.sampled_from(PRINTABLE_DTYPES) if dtype is None else dtype
    return _plain_factories(kinds) | st.sampled_from(sorted(LENS_CASES)).flatmap(partial(lens_factories, dtype=kinds))


@st.composite
def _plain_factories(draw: st.DrawFn, dtype: SearchStrategy[torch.dtype]) -> ShardedTensorFactory:
    make = draw(st.sampled_from(KINDS))
    shape = 2 * draw(st.integers(1, 3)), draw(st.integers(0, 4))
    return make("w", random_bits(shape, draw(dtype), draw(st.integers(0, 99))))


@st.composite
def lens_factories(
    draw: st.DrawFn, name: str, *, dtype: SearchStrategy[torch.dtype] | None = None
) -> ShardedTensorFactory:
    """Return a strategy for the factories of a predefined lens, on any box of its example's tensor.

    Args:
        draw: Hypothesis's own.
        name: of the example in `LENS_CASES`.
        dtype: as for `factories`.

    Examples:
        >>> from hypothesis import find
        >>> factory = find(lens_factories("transposed"), lambda factory: True)
        >>> factory.data.shape, factory.build()["0"].global_shape
        (torch.Size([3, 4]), (4, 3))
    """
    kinds = st.sampled_from(PRINTABLE_DTYPES) if dtype is None else dtype
    case = LENS_CASES[name]
    layout = draw(layouts(case.shape, draw(st.integers(1, 4)), prepended=case.prepended))
    whole = random_bits(case.shape, draw(kinds), draw(st.integers(0, 99)))
    piece = replace(draw(st.sampled_from(layout.pieces)), rank=0, flat=None)
    (shard,) = cut(replace(layout, pieces=(piece,)), case.keys[0], whole, 0)
    factory = as_factory(shard, case.lens)
    # Padding comes back as zeros, so that random values there could never pass the laws.
    stored = stored_elements(factory)
    if bool(stored.all()):
        return factory
    kept = carried(shard.data).clone()
    kept[~stored] = 0
    return replace(factory, data=kept.view(shard.dtype))
