"""The law of factories across layouts: what any number of ranks save, any other number of ranks load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..errors import plural
from ..mapping import LocalNonpersistentObject, ShardedTensor
from ..trees import apply_factories, apply_factory_merges, map_shards
from ._assemble import assemble
from ._bits import carried, first_difference
from ._layout import flattened

Whole = TypeVar("Whole")
Hold = Callable[[Whole, int], Sequence[torch.Tensor]]
Build = Callable[[torch.Tensor, int, int], Any]


def check_layouts_agree(whole: Whole, hold: Hold[Whole], build: Build, *, ranks: Sequence[int] = (1, 2, 4)) -> None:
    """Raise unless what any number of ranks store of a tensor is what any other number of ranks should get.

    That is the law that finds a tensor described as another one than it is: such a description comes back unchanged on
    as many ranks as saved it, and elsewhere without any error, with elements of other ranks in it.

    Args:
        whole: the logical tensor, or whatever `hold` understands; use numbers that are all different.
        hold: ``hold(whole, ranks)`` says what the model holds on each of so many ranks: the oracle, written without
            any library. A tensor each.
        build: ``build(local, rank, ranks)`` describes that to be saved: a ShardedTensor or a ShardedTensorFactory.
        ranks: the numbers of ranks. Each saves, and each loads what each saved.

    Raises:
        AssertionError: names the numbers of ranks, the rank and the first element that differs.

    Examples:
        Gate and up rows, fused on each rank, and described as rows of one tensor:

        >>> def hold(whole, ranks):
        ...     halves = [half.chunk(ranks) for half in whole.chunk(2)]
        ...     return [torch.cat([gate, up]) for gate, up in zip(*halves)]
        >>> def rows(local, rank, ranks):
        ...     return ShardedTensor.from_rank_offsets("w", local, (0, rank, ranks))
        >>> check_layouts_agree(torch.arange(8), hold, rows)
        Traceback (most recent call last):
        AssertionError: saved on 1 rank, loaded on 2: rank 0 gets other elements than it should hold
          2 of 4 elements differ, the first one at (2,): found 2, expected 4
    """
    held = {count: _held(whole, hold, count) for count in ranks}
    stored = {count: _stored(tensors, build) for count, tensors in held.items()}
    for saved in ranks:
        for loaded in ranks:
            what = f"saved on {_ranks(saved)}, loaded on {loaded}"
            for rank, expected in enumerate(held[loaded]):
                found = _loaded(build(torch.zeros_like(expected), rank, loaded), stored[saved], what)
                differ = first_difference(found, expected)
                if differ is not None:
                    raise AssertionError(f"{what}: rank {rank} gets other elements than it should hold\n  {differ}")


def _held(whole: Any, hold: Hold[Any], count: int) -> list[torch.Tensor]:
    tensors = list(hold(whole, count))
    assert len(tensors) == count, f"hold(whole, {count}) gave {len(tensors)} tensors, expected one for each rank"
    return tensors


def _stored(tensors: Sequence[torch.Tensor], build: Build) -> dict[str, torch.Tensor]:
    """Return the stored tensors, by key, that all ranks' trees make up."""
    count = len(tensors)
    trees = [apply_factories([build(tensor, rank, count)]) for rank, tensor in enumerate(tensors)]
    try:
        return assemble(trees)
    except AssertionError as error:
        raise AssertionError(f"saved on {_ranks(count)}: {error}") from error


def _loaded(described: Any, stored: Mapping[str, torch.Tensor], what: str) -> torch.Tensor:
    """Return what a rank gets of the stored tensors."""

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, LocalNonpersistentObject):
            return leaf.unwrap()
        if not isinstance(leaf, ShardedTensor):
            return leaf
        assert leaf.key in stored, f"{what}: {leaf.key!r} isn't stored, but {sorted(stored)}"
        shape = tuple(stored[leaf.key].shape)
        same = shape == leaf.global_shape
        assert same, f"{what}: {leaf.key!r} is stored in shape {shape}, and asked for in shape {leaf.global_shape}"
        box = carried(stored[leaf.key])[leaf.global_slice()].contiguous()
        box = box.view(stored[leaf.key].dtype).reshape(leaf.local_shape)
        return box if leaf.flattened_range is None else flattened(box)[leaf.flattened_range]

    merged: torch.Tensor = apply_factory_merges(map_shards(fill, apply_factories([described])), [described])[0]
    return merged


def _ranks(count: int) -> str:
    return plural(count, "rank")
