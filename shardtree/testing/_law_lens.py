"""The laws of lenses: stored tensors depend only on the global tensor, not on its layout, and come back unchanged.

Also an example of each predefined lens, with a tensor that fits it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, TypeVar

import torch

from .. import lenses
from ..core.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from ..core.trees import apply_factories, apply_factory_merges, map_shards
from ..errors import plural
from ..lenses import grouped_runs as groups
from ._bits import assemble, carried, check_equal, check_same, first_difference, shards_of
from ._layouts import flattened
from ._tensors import random_bits


@dataclass(frozen=True, slots=True)
class LensCase:
    """An example of a lens, with the shape and keys of global tensors that fit it.

    Attributes:
        lens: The lens.
        shape: Shape of the global tensors.
        keys: Keys of the global tensors; several if the lens stores them together.
        prepended: Number of prepended axes: leading axes that the local tensors lack.
    """

    lens: lenses.Lens
    shape: tuple[int, ...]
    keys: tuple[str, ...] = ("layers.3.mlp.w.weight",)
    prepended: int = 0


_query_groups = partial(lenses.attention_qkv, heads=4, head_size=2, query_groups=2)
_apart = partial(_query_groups, part="w", names=("q", "k", "v"))
_ROTARY = {"**.q.**": lenses.rotary_halves(head_size=2), "**.k.**": lenses.rotary_halves(head_size=2), "**.v.**": None}

# Axes mostly differ in length, so that swapped axes show in the shape. Tensors have few elements, since the laws visit
# each element in many layouts.
LENS_CASES: dict[str, LensCase] = {
    "transposed": LensCase(lenses.transposed(), (3, 4)),
    "transposed: a prepended axis": LensCase(lenses.transposed(), (2, 3, 4), prepended=1),
    "transposed: three axes": LensCase(lenses.transposed(2, 0, 1), (2, 3, 4)),
    "gate_and_up: 1 rank": LensCase(lenses.gate_and_up(tensor_parallel=1), (8, 3)),
    "gate_and_up: 3 ranks": LensCase(lenses.gate_and_up(tensor_parallel=3), (12, 2)),
    "gate_and_up: named": LensCase(
        lenses.gate_and_up(tensor_parallel=2, part="w", names=("gate", "up")), (2, 8, 1), prepended=1
    ),
    "gate_and_up: axis 1": LensCase(
        lenses.gate_and_up(tensor_parallel=2, axis=1, part="w", names=("gate", "up")), (3, 8)
    ),
    "attention_qkv: multi-head": LensCase(lenses.attention_qkv(heads=3, head_size=2), (18, 2)),
    "attention_qkv: grouped": LensCase(_apart(), (16, 2)),
    "attention_qkv: grouped, in one": LensCase(_query_groups(), (16, 2)),
    "attention_qkv: bias": LensCase(_apart(), (16,)),
    "attention_qkv: to interleaved": LensCase(_query_groups(held="concatenated", stored="interleaved"), (16, 2)),
    "attention_qkv: rank by rank": LensCase(_apart(held="concatenated", tensor_parallel=2), (16, 2)),
    "attention_qkv: rank by rank, in one": LensCase(
        lenses.attention_qkv(heads=4, head_size=1, held="concatenated", tensor_parallel=2), (12, 2)
    ),
    "rotary_halves": LensCase(lenses.rotary_halves(head_size=4), (12, 2)),
    "rotary_halves: some rows": LensCase(lenses.rotary_halves(head_size=5, rotary_size=4), (10,)),
    "rotary_pairs": LensCase(lenses.rotary_pairs(head_size=6), (12, 2)),
    "stacked_layers": LensCase(lenses.stacked_layers("layers", 2), (3, 2), ("layers.0.w", "layers.1.w"), 1),
    "stacked_layers: of a scalar": LensCase(
        lenses.stacked_layers("layers", 2, first=-2), (), ("layers.2.w", "layers.3.w")
    ),
    "unstacked_layers": LensCase(lenses.unstacked_layers("layers"), (3, 2, 2), ("layers.norm",)),
    "unstacked_layers: a prepended axis": LensCase(lenses.unstacked_layers("layers"), (3, 2, 2), ("layers.norm",), 1),
    "expert_stack": LensCase(lenses.expert_stack(experts=3, axis=1), (2, 6)),
    "expert_keys": LensCase(lenses.expert_keys("experts", experts=2), (6, 2), ("mlp.experts.fc2",)),
    "expert_keys: in stacked layers": LensCase(
        lenses.expert_keys("experts", experts=2), (2, 6, 2), ("layers.experts.fc2",), 1
    ),
    "padded_axis": LensCase(lenses.padded_axis(5), (8, 2)),
    "padded_axis: axis 1": LensCase(lenses.padded_axis(3, axis=1), (2, 6)),
    "tied": LensCase(lenses.tied("w", "embedding"), (3, 2)),
    "renamed": LensCase(lenses.renamed("mlp.w", "ffn"), (3, 2)),
    "by_pattern": LensCase(lenses.compose(_apart(), lenses.by_pattern(_ROTARY)), (16, 2)),
    "rearranged: experts": LensCase(lenses.rearranged("(e f) h -> e h f", e=2), (6, 2)),
    "rearranged: ranks of experts": LensCase(
        lenses.rearranged("h (p t e two f) -> (p e) (two t f) h", p=2, t=2, e=1, two=2), (2, 16)
    ),
    "rearranged: prepended too": LensCase(lenses.rearranged("l e d -> d (l e)"), (2, 2, 3), prepended=1),
    "mapped_axis": LensCase(lenses.mapped_axis(-1, lambda n: groups(n, 2, (1, 2)), part="w", names=("a", "b")), (2, 6)),
    "from_function: transposed": LensCase(lenses.from_function(lambda w: w.T), (3, 4)),
    "from_function: a prepended axis": LensCase(lenses.from_function(lambda w: w.flip(0).T), (2, 3, 4), prepended=1),
    "from_function: gate and up": LensCase(
        lenses.from_function(lambda w: dict(zip(("gate", "up"), w.view(2, 2, -1, 3).unbind(1), strict=True)), part="w"),
        (8, 3),
    ),
    "from_function: rows of padding": LensCase(lenses.from_function(lambda w: w[:5], drop=True), (8, 2)),
    "from_function: of experts": LensCase(
        lenses.compose(
            lenses.from_function(lambda w: dict(zip("01", w.chunk(2), strict=True)), part="fc2"),
            lenses.renamed("mlp", "ffn"),
        ),
        (6, 2),
        ("mlp.experts.fc2",),
    ),
    "compose": LensCase(lenses.compose(), (2, 3)),
    "compose: four deep": LensCase(
        lenses.compose(
            lenses.expert_keys("experts", experts=2, axis=1),
            lenses.gate_and_up(tensor_parallel=2, axis=1, part="w", names=("gate", "up")),
            lenses.transposed(),
            lenses.stacked_layers("experts", 2),
            lenses.stacked_layers("layers", 2),
        ),
        (3, 16),
        ("layers.0.experts.w", "layers.1.experts.w"),
    ),
}
"""Examples by name: the name of the predefined lens, and the special feature of the example."""


# The laws


_STATE = "optimizer.state.exp_avg."


def check_lens(
    lens: lenses.Lens,
    shards: Sequence[ShardedTensor],
    *,
    lossy: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Check the laws of lenses for shards of a tensor, and return the stored tensors, by key.

    - *Boxes agree*: all ranks' stored boxes together equal the stored form of the whole tensor, bit for bit.
    - *Merge undoes build*, for each shard. Elements that the lens doesn't store (padding) must merge to the same values
      in a shard as in the whole tensor.
    - *Build undoes merge*: any loaded tensors are stored again unchanged.
    - *States are cut alike*: an optimizer state of another dtype has the same boxes, under its own key.
    - *Data don't matter*: without data the boxes are the same.

    A lossy lens, such as one that quantises, must keep these laws instead of the second and third:

    - *The error is the format's*: merging the stored form of the whole tensor gives each element with an error of at
      most `lossy`, and merging the stored form of a shard gives the same elements.
    - *Idempotent*: loaded tensors are stored again unchanged.

    Args:
        lens: Any lens.
        shards: All ranks' shards of one tensor of the model, or of several that the lens stores as one; with data, as
            boxes, flat ranges or replicas.
        lossy: Function from a whole tensor of the model to the largest allowed error of each element, in a shape that
            broadcasts to the tensor's; None for a lossless lens.

    Raises:
        AssertionError: The lens breaks a law; the error names the law and the difference.

    Examples:
        >>> from shardtree.lenses import transposed
        >>> shards = [ShardedTensor.from_rank_offsets("w", torch.full((1, 2), rank), (0, rank, 2)) for rank in (0, 1)]
        >>> check_lens(transposed(), shards)
        {'w': tensor([[0, 1],
                [0, 1]])}
    """
    tensors = assemble([shards])
    wholes = _wholes(tensors, {shard.key: shard.prepend_axis_num for shard in shards})
    pairs = [(factory, factory.build()) for factory in (lenses.as_factory(whole, lens) for whole in wholes)]
    expected = _assemble([tree for _, tree in pairs])
    merges = assemble([[replace(whole, data=_merge(*pair)) for whole, pair in zip(wholes, pairs, strict=True)]])
    if lossy is not None:
        _check_errors(merges, tensors, lossy)
    # A lens that drops padding can't restore it, so that only ranks are compared with each other, below.
    elif _elements(expected) == _elements(tensors):
        check_same("merge does not undo build on the whole", merges, tensors)
    factories = [lenses.as_factory(shard, lens) for shard in shards]
    trees = [factory.build() for factory in factories]
    for shard, factory, tree in zip(shards, factories, trees, strict=True):
        law = "merge does not undo build" if lossy is None else "the lens does not commute with cuts"
        what = f"{law} on {_describe(shard)}"
        check_same(what, {shard.key: _merge(factory, tree)}, {shard.key: _part(merges[shard.key], shard)})
        _check_state(factory, tree)
    check_same("boxes do not agree: assembled, they differ from the stored whole", _assemble(trees), expected)
    if lossy is None:
        check_build_undoes_merge(factories, expected)
    else:
        _check_built_again(factories, expected, "not idempotent: loaded tensors are stored differently,")
    return expected


def _check_errors(
    merges: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    lossy: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    for key, tensor in tensors.items():
        error = (merges[key].double() - tensor.double()).abs()
        allowed = lossy(tensor).double().expand(error.shape)
        worse = torch.nonzero(~(error <= allowed))  # a NaN is worse than any bound
        if len(worse):
            at = tuple(worse[0].tolist())
            what = f"{len(worse)} of {error.numel()} elements of {key!r} lose more than `lossy` allows, first {at}"
            raise AssertionError(f"{what}: {tensor[at].item()} comes back as {merges[key][at].item()}")


def check_build_undoes_merge(factories: Sequence[ShardedTensorFactory], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise unless random tensors of the stored shapes, merged and built again, are unchanged."""
    # The bits are new, since a lens that remembers what it built would pass with the same bits.
    sizes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    other = {key: random_bits(*size, seed=number) for number, (key, size) in enumerate(sizes.items(), start=7)}
    _check_built_again(factories, other, "build does not undo merge")


def _check_built_again(factories: Sequence[ShardedTensorFactory], wholes: Mapping[str, torch.Tensor], law: str) -> None:
    """Raise unless stored tensors are unchanged after each factory merged its part and built it again.

    Args:
        factories: Factories with data, of all ranks.
        wholes: Whole stored tensors, by key.
        law: Text of the broken law, for the error.
    """
    for factory in factories:
        tree = map_shards(
            lambda leaf: replace(leaf, data=_part(wholes[leaf.key], leaf)) if isinstance(leaf, ShardedTensor) else leaf,
            apply_factories([factory]),
        )
        data = apply_factory_merges(map_shards(_data, tree), [factory])[0]
        again = apply_factories([replace(factory, data=data)])
        pairs = zip(shards_of(tree).values(), shards_of(again).values(), strict=True)
        for put, copy in pairs:
            check_equal(f"{law} on {_describe(put)}", copy.data, put.data)


def _check_state(factory: ShardedTensorFactory, tree: Any) -> None:
    # The state has another dtype, like the moments of a bfloat16 parameter, since boxes must not depend on the dtype.
    empty = torch.zeros(tuple(factory.data.shape), dtype=torch.float64, device="cpu")
    state = replace(factory, key=_STATE + factory.key, data=empty)
    boxes = [_box(shard) for shard in shards_of(tree).values()]
    as_state = [(_STATE + key, *rest) for key, *rest in boxes]
    state_boxes = [_box(shard) for shard in shards_of(state.build()).values()]
    assert state_boxes == as_state, f"a state of {factory.key!r} is cut differently: {state_boxes}, not {as_state}"
    bare = [_box(shard) for shard in shards_of(factory.without_data().build()).values()]
    assert bare == boxes, f"without data {factory.key!r} is cut differently: {bare}, not {boxes}"


def _wholes(tensors: Mapping[str, torch.Tensor], fronts: Mapping[str, int]) -> list[ShardedTensor]:
    """Return shards that cover whole tensors: one for each index along a tensor's prepended axes, or one without them.

    Args:
        tensors: Global tensors, by key.
        fronts: Number of prepended axes of each tensor, by key: leading axes that the shards' own data lack.
    """
    wholes = []
    for key, tensor in tensors.items():
        front = fronts[key]
        shape, local = tuple(tensor.shape), tuple(tensor.shape[front:])
        for place in product(*map(range, shape[:front])):
            offset = (*place, *(0 for _ in local))
            data = carried(tensor)[place].view(tensor.dtype)
            wholes.append(ShardedTensor(key, data, tensor.dtype, local, shape, offset, None, prepend_axis_num=front))
    return wholes


def _elements(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _assemble(trees: Sequence[Any]) -> dict[str, torch.Tensor]:
    return assemble([[replace(shard, replica_id=0) for shard in shards_of(tree).values()] for tree in trees])


def _merge(factory: ShardedTensorFactory, tree: Any) -> torch.Tensor:
    tensor = apply_factory_merges(map_shards(_data, [tree]), [factory])[0]
    assert isinstance(tensor, torch.Tensor), f"merge of {factory.key!r} gave a {type(tensor).__name__}"
    return tensor


def _data(leaf: Any) -> Any:
    """Return a copy of a shard's data, or another leaf unchanged.

    A load too passes new tensors to a merge, so a merge must not rely on the tensors that the factory built.
    """
    return carried(leaf.data).clone().view(leaf.dtype) if isinstance(leaf, ShardedTensor) else leaf


def _part(tensor: torch.Tensor, shard: ShardedTensor) -> torch.Tensor:
    box = carried(tensor)[shard.global_slice()].contiguous()
    flat = shard.flattened_range
    return (box if flat is None else box.view(prod(box.shape))[flat]).view(tensor.dtype)


def _box(shard: ShardedTensor) -> tuple[Any, ...]:
    return shard.key, shard.global_shape, shard.global_offset, shard.local_shape, shard.replica_id


def _describe(shard: ShardedTensor) -> str:
    flat = "" if shard.flattened_range is None else f", {shard.flattened_range} of it"
    return f"{shard.key!r}, box {shard.local_shape} at {shard.global_offset}{flat}"


# The law of layouts: what any number of ranks save, any other number of ranks can load.

Whole = TypeVar("Whole")
Hold = Callable[[Whole, int], Sequence[torch.Tensor]]
Build = Callable[[torch.Tensor, int, int], Any]


def check_layouts_agree(whole: Whole, hold: Hold[Whole], build: Build, *, ranks: Sequence[int] = (1, 2, 4)) -> None:
    """Raise unless a tensor that is saved on any number of ranks is loaded correctly on any other number.

    This law finds wrong descriptions of a tensor. On the same number of ranks their round trips pass, but on other
    numbers a rank gets other ranks' elements without any error.

    Args:
        whole: The whole tensor, or any value that `hold` accepts; its elements should all differ.
        hold: Function that returns each rank's local tensor of the model, called as ``hold(whole, ranks)``. It is
            the reference, so write it without this library.
        build: Function that describes a local tensor for saving as a shard or a factory, called as
            ``build(local, rank, ranks)``.
        ranks: Numbers of ranks, tried in all pairs of a save and a load.

    Raises:
        AssertionError: A rank loads wrong elements; the error names the numbers of ranks, the rank and the first
            difference.

    Examples:
        Gate and up rows, fused on each rank, but described as rows of one tensor:

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
    locals_by_count = {count: list(hold(whole, count)) for count in ranks}
    for count, tensors in locals_by_count.items():
        assert len(tensors) == count, f"hold(whole, {count}) gave {len(tensors)} tensors, expected one for each rank"
    tensors_by_count = {count: _stored_by_ranks(tensors, build) for count, tensors in locals_by_count.items()}
    for save_ranks in ranks:
        for load_ranks in ranks:
            what = f"saved on {_ranks(save_ranks)}, loaded on {load_ranks}"
            for rank, expected in enumerate(locals_by_count[load_ranks]):
                found = _load(build(torch.zeros_like(expected), rank, load_ranks), tensors_by_count[save_ranks], what)
                differ = first_difference(found, expected)
                if differ is not None:
                    raise AssertionError(f"{what}: rank {rank} gets other elements than it should hold\n  {differ}")


def _stored_by_ranks(tensors: Sequence[torch.Tensor], build: Build) -> dict[str, torch.Tensor]:
    """Build each rank's local tensor, and return the stored tensors, by key, assembled from all ranks' shards."""
    count = len(tensors)
    trees = [apply_factories([build(tensor, rank, count)]) for rank, tensor in enumerate(tensors)]
    try:
        return assemble(trees)
    except AssertionError as error:
        raise AssertionError(f"saved on {_ranks(count)}: {error}") from error


def _load(tree: Any, tensors: Mapping[str, torch.Tensor], what: str) -> torch.Tensor:
    """Return a rank's local tensor, filled from the stored tensors.

    Args:
        tree: Shard or factory of the local tensor.
        tensors: Whole stored tensors, by key.
        what: Beginning of error messages.
    """

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, LocalNonpersistentObject):
            return leaf.unwrap()
        if not isinstance(leaf, ShardedTensor):
            return leaf
        assert leaf.key in tensors, f"{what}: {leaf.key!r} is not stored; stored are {sorted(tensors)}"
        shape = tuple(tensors[leaf.key].shape)
        same = shape == leaf.global_shape
        assert same, f"{what}: {leaf.key!r} is stored in shape {shape}, but requested in shape {leaf.global_shape}"
        box = carried(tensors[leaf.key])[leaf.global_slice()].contiguous()
        box = box.view(tensors[leaf.key].dtype).reshape(leaf.local_shape)
        return box if leaf.flattened_range is None else flattened(box)[leaf.flattened_range]

    tensor: torch.Tensor = apply_factory_merges(map_shards(fill, apply_factories([tree])), [tree])[0]
    return tensor


def _ranks(count: int) -> str:
    return plural(count, "rank")
