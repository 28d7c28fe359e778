"""The laws of factories: build and merge undo each other, for parameters, optimizer states and flat ranges.

Also factories like those of models, to try the laws on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ..core.mapping import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from ..core.trees import apply_factories, apply_factory_merges, map_shards
from ..errors import render_path
from ..lenses import as_factory
from ._bits import bits, carried, check_equal, first_difference, shards_of
from ._law_lens import LENS_CASES
from ._layouts import cut, layouts
from ._tensors import PRINTABLE_DTYPES, random_bits

# These factories are written with a build and a merge function, as in Megatron-Core, rather than as lenses, since the
# laws must hold for such factories too.


def glu(key: str, data: Any, rank: int = 0, ranks: int = 1, *, replica_id: ReplicaId = 0) -> ShardedTensorFactory:
    """Return the factory of a gated layer's weight; it stores the gate rows and the value rows as separate shards.

    This way the weight can be loaded on any number of ranks. The factory's build function also accepts a flat range of
    the weight.

    Args:
        key: Name of the tensor.
        data: Gate rows above value rows, shape (2 * rows, ...).
        rank: Index of this rank among the ranks that share the rows.
        ranks: Number of ranks that share the rows.
        replica_id: Replica number, as in `ShardedTensor`.

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
                key, data[span], half, cut, flattened_range=inside, replica_id=replica_id
            )
            for cut, (span, inside) in zip(cuts, _halves(flattened_range, torch.Size(half).numel()), strict=True)
        ]

    return ShardedTensorFactory(key, data, build, lambda parts: torch.cat(list(parts)), replica_id)


def _halves(flat: slice, volume: int) -> list[tuple[slice, slice]]:
    """Split a flat range at the middle of a tensor that consists of two halves.

    Args:
        flat: Range of the flattened tensor.
        volume: Number of elements of one half.

    Returns:
        For each half, two slices of the same elements: one of the range's own data, one of the flattened half.
    """
    parts = []
    for begin in (0, volume):
        first, last = (min(max(at, begin), begin + volume) for at in (flat.start, flat.stop))
        parts.append((slice(first - flat.start, last - flat.start), slice(first - begin, last - begin)))
    return parts


def transposed(key: str, data: Any, *cuts: tuple[int, int, int], replica_id: ReplicaId = 0) -> ShardedTensorFactory:
    """Return the factory of a matrix that is stored transposed.

    Args:
        key: Name of the tensor.
        data: The local matrix, before it is transposed.
        cuts: Cuts of the stored matrix, as for `ShardedTensor.from_rank_offsets`: (axis, index of the rank, ranks).
        replica_id: Replica number, as in `ShardedTensor`.

    Examples:
        >>> transposed("w", torch.zeros(2, 3)).build().global_shape
        (3, 2)
    """

    def build(key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data.transpose(0, 1), *cuts, replica_id=replica_id)

    return ShardedTensorFactory(key, data, build, lambda tensor: tensor.transpose(0, 1), replica_id)


def stacked(key: str, data: Any, first: int = 0, layers: int | None = None) -> ShardedTensorFactory:
    """Return the factory of stacked layers; it stores each layer as a separate shard of one global tensor.

    The leading axis of the global tensor is the index of the layer.

    Args:
        key: Name of the tensor.
        data: The local layers, shape (local layers, ...).
        first: Index of the first local layer.
        layers: Number of layers in the whole model; by default, the number of local layers.

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

    return ShardedTensorFactory(key, data, build, lambda parts: torch.stack(list(parts)))


KINDS: tuple[Callable[[str, torch.Tensor], ShardedTensorFactory], ...] = (glu, transposed, stacked)


def factories(*, dtype: SearchStrategy[torch.dtype] | None = None) -> SearchStrategy[ShardedTensorFactory]:
    """Return a strategy for factories: those of this module, and those of predefined lenses for boxes of a tensor.

    Elements that a lens doesn't store, such as padding, are zero.

    Args:
        dtype: A strategy for dtypes; by default those that torch can print, so that failures can be shown.

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
    """Return a strategy for factories of a predefined lens, each with a random box of a tensor that fits the lens.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        name: Name of an example in `LENS_CASES`.
        dtype: A strategy for dtypes, as in `factories`.

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
    is_stored = stored_elements(factory)
    if bool(is_stored.all()):
        return factory
    data = carried(shard.data).clone()
    data[~is_stored] = 0
    return replace(factory, data=data.view(shard.dtype))


# The laws


_MOMENT_DTYPES = (torch.float32, torch.bfloat16)


def check_factory(
    factory: ShardedTensorFactory, *, states: Sequence[torch.Tensor] | None = None, flat: Sequence[slice] = ()
) -> None:
    """Raise unless a factory obeys the laws of lenses, also for optimizer states and flat ranges.

    - *Merge undoes build*: the built tensors, stored and read back, merge to the original tensor.
    - *Build undoes merge*: if other tensors replace the stored ones, merging them and building again gives the same
      tensors.
    - *States are cut alike*: for a tensor of the same shape, of any dtype and under another key, the factory builds
      tensors of the same global shapes, cut into the same boxes.
    - *Flat ranges are parts of the whole*: each element of a flat range is stored where the whole tensor stores it.
    - Building doesn't change its argument.

    Args:
        factory: Factory with data.
        states: Optimizer states to try; by default two of random bits, in float32 and bfloat16. Elements that the
            factory does not store, such as a vocabulary's padding, come back as the factory's fill value. So these
            elements must have the fill value in the factory's tensor and in the states that you pass; the default
            states copy it from the tensor.
        flat: Slices of the row-major flattened tensor from which the factory must build too, as for ZeRO.

    Raises:
        AssertionError: The factory breaks a law; the error names the law, the tensor and the difference.

    Examples:
        >>> from shardtree.testing import glu, transposed
        >>> check_factory(transposed("w", torch.arange(6).reshape(2, 3)))
        >>> check_factory(glu("w", torch.arange(12).reshape(4, 3)), flat=[slice(2, 7)])

        Your own lens, as a factory; its padding is zeros:

        >>> from shardtree.lenses import as_factory, padded_axis
        >>> padded = torch.cat([torch.ones(5, 2), torch.zeros(3, 2)])
        >>> shard = ShardedTensor.from_rank_offsets("embedding", padded)
        >>> check_factory(as_factory(shard, padded_axis(5)), flat=[slice(3, 12)])
    """
    states = _states(factory) if states is None else states
    # States go through the same factory under another key, since a load must find them wherever it finds the
    # parameter.
    keys = (f"optimizer.state.{number}.{factory.key}" for number in range(len(states)))
    variants = [factory, *(replace(factory, key=key, data=state) for key, state in zip(keys, states, strict=True))]
    for variant in variants:
        check_merge_undoes_build(variant)
        check_cut_alike(factory, variant)
    for variant in variants:
        check_build_undoes_merge(variant)
    for part in flat:
        for variant in variants:
            data = carried(variant.data).contiguous().view(-1)[part].view(variant.data.dtype)
            range_factory = replace(variant, data=data, flattened_range=part)
            check_merge_undoes_build(range_factory)
            check_build_undoes_merge(range_factory)
        _check_part_of_whole(factory, part)


def _states(factory: ShardedTensorFactory) -> list[torch.Tensor]:
    shape, is_stored = tuple(factory.data.shape), stored_elements(factory)
    states = [random_bits(shape, dtype, seed=number + 1) for number, dtype in enumerate(_MOMENT_DTYPES)]
    if bool(is_stored.all()):
        return states
    # Elements that aren't stored have the parameter's values, which are the fill.
    has_fill = bool(carried(factory.data)[~is_stored].any())
    fills = [factory.data.to(state.dtype) if has_fill else torch.zeros_like(state) for state in states]
    return [torch.where(is_stored, state, fill) for state, fill in zip(states, fills, strict=True)]


def stored_elements(factory: ShardedTensorFactory) -> torch.Tensor:
    """Return a mask of the elements that a factory stores, bool of its tensor's shape.

    Examples:
        >>> from shardtree.lenses import as_factory, padded_axis
        >>> stored_elements(as_factory(ShardedTensor.from_rank_offsets("w", torch.zeros(4)), padded_axis(3)))
        tensor([ True,  True,  True, False])
    """
    shape = tuple(factory.data.shape)
    is_stored = torch.zeros(factory.data.numel(), dtype=torch.bool, device="cpu")
    numbers = torch.arange(is_stored.numel(), dtype=torch.int64, device="cpu").view(shape)
    is_stored[list(_stored_elements(replace(factory, data=numbers)).values())] = True
    return is_stored.view(shape)


def check_merge_undoes_build(factory: ShardedTensorFactory) -> None:
    """Raise unless the built tensors, copied to new memory, merge to the factory's original tensor."""
    before = bits(factory.data)  # the parameter itself, which training continues to use
    tree = _build(factory)
    assert bits(factory.data) == before, f"building {factory.key!r}{_range(factory)} changed the factory's tensor"
    what = f"merge does not undo build for {factory.key!r}{_range(factory)}"
    check_equal(what, _merge(factory, map_shards(_reload, tree)), factory.data)


def check_build_undoes_merge(factory: ShardedTensorFactory) -> None:
    """Replace the built tensors by random ones, merge and build again; raise unless that gives the random tensors."""
    # Shards of the same box, such as those of tied weights, get the same tensor, since a checkpoint stores it once.
    tree = _build(factory)
    put: dict[Any, torch.Tensor] = {}
    for shard in shards_of(tree).values():
        put.setdefault(_box(shard), random_bits(shard.data_shape, shard.dtype, seed=len(put) + 7))
    other = map_shards(lambda leaf: put[_box(leaf)] if isinstance(leaf, ShardedTensor) else _reload(leaf), tree)
    again = _build(replace(factory, data=_merge(factory, other)))
    for path, shard in shards_of(again).items():
        wrong = first_difference(shard.data, put[_box(shard)]) if _box(shard) in put else "it has another box"
        where = f"{shard.key!r} at {render_path(path, 'built')}"
        assert wrong is None, f"build does not undo merge for {factory.key!r}{_range(factory)}: {where}: {wrong}"


def check_cut_alike(factory: ShardedTensorFactory, state: ShardedTensorFactory) -> None:
    """Raise unless both factories build the same boxes, at the same paths, of tensors of the same global shapes."""
    left, right = (
        [(path, *_box(shard)[1:]) for path, shard in shards_of(_build(each)).items()] for each in (factory, state)
    )
    assert left == right, f"{state.key!r} is cut differently from {factory.key!r}: {right}, not {left}"


def _check_part_of_whole(factory: ShardedTensorFactory, part: slice) -> None:
    """Raise unless a factory of only a flat range stores its elements where a factory of the whole tensor does."""
    # Data are the elements' indices, so that each stored value identifies its element.
    numbers = torch.arange(factory.data.numel(), dtype=torch.int64, device="cpu")
    whole = _stored_elements(replace(factory, data=numbers.view(tuple(factory.data.shape))))
    elements = _stored_elements(replace(factory, data=numbers[part], flattened_range=part))
    inside = range(part.start, part.stop)
    expected = {place: number for place, number in whole.items() if number in inside}
    what = f"{factory.key!r} on {part} is not that part of the whole"
    for place in {**elements, **expected}:
        (key, index), there, right = place, elements.get(place), whole.get(place)
        assert there == right, f"{what}: {key!r}{list(index)} is element {there}, of the whole it is element {right}"


def _stored_elements(factory: ShardedTensorFactory) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return the value of each stored element, by key and global index.

    Callers pass the elements' own indices as data, so that the values show which element is stored where.
    """
    elements: dict[tuple[str, tuple[int, ...]], int] = {}
    for shard in shards_of(_build(factory)).values():
        sizes = (*(1,) * shard.prepend_axis_num, *shard.local_shape)
        index = list(product(*(range(at, at + size) for at, size in zip(shard.global_offset, sizes, strict=True))))
        places = index if shard.flattened_range is None else index[shard.flattened_range]
        for place, number in zip(places, shard.data.reshape(-1).tolist(), strict=True):
            elements[shard.key, place] = number
    return elements


def _build(factory: ShardedTensorFactory) -> Any:
    return apply_factories([factory])


def _merge(factory: ShardedTensorFactory, tree: Any) -> torch.Tensor:
    tensor = apply_factory_merges(tree, [factory])[0]
    assert isinstance(tensor, torch.Tensor), f"merge of {factory.key!r} gave a {type(tensor).__name__}, not a tensor"
    return tensor


def _reload(leaf: Any) -> Any:
    if isinstance(leaf, ShardedTensor):
        return carried(leaf.data).clone().view(leaf.dtype)
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf.unwrap()
    return leaf.data if isinstance(leaf, ShardedBase) else leaf


def _box(shard: ShardedTensor) -> tuple[Any, ...]:
    return shard.key, shard.global_shape, shard.global_offset, shard.local_shape, str(shard.flattened_range)


def _range(factory: ShardedTensorFactory) -> str:
    return "" if factory.flattened_range is None else f" on {factory.flattened_range}"
