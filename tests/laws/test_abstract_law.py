"""What doesn't look at elements gives of meta tensors what it gives of tensors: metadata, shapes, dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree import transforms
from shardtree.core import trees
from shardtree.core.lazy import LazyTensor
from shardtree.errors import CheckpointingException
from shardtree.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.testing import LENS_CASES, cut, dtypes, layouts, random_bits
from tests.core.trees.samples import assert_caught
from tests.core.trees.samples import trees as drawn_trees

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

some_examples = settings(max_examples=max(8, settings.default.max_examples // 4))

Transform = Callable[[Any], Any]


def shape_of(leaf: Any) -> Any:
    """Return what is known of a leaf without a look at elements."""
    if isinstance(leaf, (torch.Tensor, LazyTensor)):
        return leaf.dtype, tuple(leaf.shape)
    if isinstance(leaf, ShardedTensor):
        return leaf.without_data(), shape_of(leaf.data)
    if isinstance(leaf, ShardedTensorFactory):
        return leaf.key, leaf.replica_id, leaf.flattened_range, shape_of(leaf.data)
    if isinstance(leaf, LocalNonpersistentObject):
        return type(leaf.unwrap())  # what merges is a function of each build's own
    return leaf.without_data() if isinstance(leaf, ShardedObject) else leaf


def shapes_of(value: Any) -> list[tuple[Any, Any]]:
    return [(path, shape_of(leaf)) for path, leaf in trees.leaves_with_paths(value)]


def outcome(transform: Transform, tree: Any) -> Any:
    try:
        return shapes_of(transform(tree))
    except CheckpointingException as error:
        return type(error), str(error).splitlines()[0]


def gives_the_same_of_meta_tensors(transform: Transform, tree: Any) -> None:
    meta = st.without_data(tree, meta=True)
    held = [leaf for _, leaf in trees.leaves_with_paths(meta)]
    assert all(leaf.data.is_meta for leaf in held if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)))
    assert outcome(transform, meta) == outcome(transform, tree)


def merged(tree: Any) -> Any:
    return st.apply_factory_merges(st.unbox(st.apply_factories(tree)), tree)


def tensors_alone(tree: Any) -> Any:
    """Return the tree without what holds values of other kinds, whose loss of data `unbox` shows."""
    kinds = (ShardedObject, LocalNonpersistentObject)
    return st.map_shards(lambda leaf: None if isinstance(leaf, kinds) else leaf, tree)


OF_TREES: dict[str, Transform] = {
    "apply_factories": st.apply_factories,
    "build_factories": lambda tree: trees.build_factories(tree)[0],
    "apply_factory_merges": lambda tree: merged(tensors_alone(tree)),
    "cast": partial(st.cast, dtype=torch.bfloat16),
    "cast some": partial(st.cast, dtype=torch.bfloat16, keys=["**"]),
    "combine": lambda tree: st.combine(*st.trees.extract_sharded(tree)),
    "common_with_holes": st.core.trees.common_with_holes,
    "extract_metadata": st.extract_metadata,
    "extract_nonpersistent": lambda tree: list(st.trees.extract_nonpersistent(tree)),
    "extract_sharded": lambda tree: list(st.trees.extract_sharded(tree)),
    "map_data": partial(st.map_data, lambda data: data.clone()),
    "map_shards": partial(st.map_shards, lambda leaf: leaf),
    "map_by_pattern": lambda tree: st.map_by_pattern({"**": lambda data: data.clone()})(tree),
    "map_with_path": partial(st.trees.map_with_path, lambda path, leaf: leaf),
    "merge": lambda tree: st.merge({"a": tree}, {"b": tree}),
    "narrow": lambda tree: st.narrow(st.apply_factories(tree), 0, 0, 1),
    "partition by names": lambda tree: list(st.partition(tree, "a*", True)),
    "partition": lambda tree: list(st.partition(tree, lambda leaf: isinstance(leaf, ShardedTensor))),
    "prefix": partial(st.prefix, text="p."),
    "prune": trees.prune,
    "rebox": lambda tree: st.rebox(tree, st.unbox(tree)),
    "rename": partial(st.rename, names={"a": "z"}),
    "select": partial(st.select, wanted="a*"),
    "unbox": lambda tree: st.unbox(tensors_alone(tree)),
    "without_data": st.without_data,
    "without_holes": st.core.trees.without_holes,
}


@pytest.mark.parametrize("name", OF_TREES)
@some_examples
@given(tree=drawn_trees())
def test_tree_functions_give_the_same_of_meta_tensors(name: str, tree: Any) -> None:
    gives_the_same_of_meta_tensors(OF_TREES[name], tree)


NAMES = [f"{kind}.*.part" for kind in "ab"]
FLAT: dict[str, Transform] = {
    "partial_rename": partial(st.transforms.partial_rename, names={"h.*.w": "layers.*.w"}),
    "stack_layers": partial(st.transforms.stack_layers, prefix="h"),
    "unstack_layers": lambda tree: st.transforms.unstack_layers(st.transforms.stack_layers(tree, "h"), "h"),
    "split_tensor": partial(st.transforms.split_tensor, key="h.*.w", names=NAMES, sizes=[1, 3], axis=-1),
    "merge_tensors": lambda tree: st.transforms.merge_tensors(
        st.transforms.split_tensor(tree, "h.*.w", NAMES, groups=2, axis=-1), NAMES, "h.*.w", groups=2, axis=-1
    ),
    "pad_tensors": partial(st.transforms.pad_tensors, keys=["v"], length=7),
    "pad_tensors by a function": partial(st.transforms.pad_tensors, keys=["v"], length=7, fill=lambda v: v[:0].sum()),
    "keep_layers": partial(st.transforms.keep_layers, prefix="h", layers=[0, 0], absent=[0]),
    "unpad_tensors": partial(st.transforms.unpad_tensors, keys=["v"], length=1),
    "transpose_tensors": partial(st.transforms.transpose_tensors, keys=["h.*.w"]),
    "tree_at": partial(st.tree_at, where="h.**", replace=lambda shard: shard.key),
    "data_at": partial(st.data_at, where="h.*.w", data=lambda data: data.flip(0)),
    "factories_by_pattern": lambda tree: merged(st.lenses.factories_by_pattern(tree, {"h.**": st.lenses.transposed()})),
    "as_factory": lambda tree: merged([st.lenses.as_factory(tree["v"], st.lenses.transposed(0))]),
    "flat_of": lambda tree: [st.lenses.flat_of(tree["flat"], [box.data for box in st.lenses.boxes_of(tree["flat"])])],
    "boxes_of": lambda tree: list(st.lenses.boxes_of(tree["flat"])),
    "shard": lambda tree: st.shard({"v": tree["v"]}, st.Mesh(tp=2, dp=2), st.PartitionSpec("tp")),
    "abstract": lambda tree: st.abstract(
        {"v": tree["v"]}, st.Mesh(tp=2), st.PartitionSpec(st.layouts.AxisSplit("tp", 2))
    ),
}
"""Functions of flat trees, where they find what they work on."""


@some.composite
def flat_trees(draw: some.DrawFn) -> dict[str, ShardedTensor]:
    dtype = draw(dtypes())
    layers = [
        ShardedTensor.from_rank_offsets(f"h.{number}.w", random_bits((2, 4), dtype, number), (0, 0, 2))
        for number in range(draw(some.integers(1, 3)))
    ]
    vector = ShardedTensor.from_rank_offsets("v", random_bits((draw(some.integers(0, 5)),), dtype, 7))
    whole = random_bits((12,), dtype, 8)[2:9]
    flat = ShardedTensor.from_rank_offsets_flat("flat", whole, (3, 4), flattened_range=slice(2, 9))
    return {leaf.key: leaf for leaf in (*layers, vector, flat)}


@pytest.mark.parametrize("name", FLAT)
@some_examples
@given(tree=flat_trees())
def test_transforms_give_the_same_of_meta_tensors(name: str, tree: dict[str, ShardedTensor]) -> None:
    gives_the_same_of_meta_tensors(FLAT[name], tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", LENS_CASES)
@some_examples
@given(data=some.data())
def test_lenses_build_and_merge_the_same_of_meta_tensors(name: str, data: some.DataObject) -> None:
    case = LENS_CASES[name]
    layout = data.draw(layouts(case.shape, 2, prepended=case.prepended))
    wholes = {key: random_bits(case.shape, data.draw(dtypes()), 1) for key in case.keys}
    shards = [shard for key in case.keys for rank in (0, 1) for shard in cut(layout, key, wholes[key], rank)]
    factories = [st.lenses.as_factory(shard, case.lens) for shard in shards]
    gives_the_same_of_meta_tensors(st.apply_factories, factories)
    gives_the_same_of_meta_tensors(merged, factories)


def test_every_function_of_a_tree_is_held_to_this() -> None:
    of_trees = {name for name in dir(trees) if name in dir(st) and first_parameter(getattr(trees, name)) == "tree"}
    kinds = ("tree", "shard")
    of_flat = {name for name in dir(transforms) if first_parameter(getattr(transforms, name)) in kinds}
    assert of_trees - {"flatten_with_paths", "leaves_with_paths", "shard_leaves"} <= OF_TREES.keys()
    # Names and boxes: they move no elements, and are held to this among the functions of trees.
    assert of_flat - {"flat", "nested", "rebox", "unbox"} <= FLAT.keys()


def first_parameter(value: Any) -> str | None:
    return next(iter(inspect.signature(value).parameters), None) if inspect.isfunction(value) else None


def test_the_law_catches_what_looks_at_elements() -> None:
    def without_zeros(tree: Any) -> Any:
        return st.map_shards(shortened, tree)

    def shortened(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor) or leaf.data.is_meta or not leaf.data.numel():
            return leaf
        return replace(leaf, key=f"{leaf.key}.{int(leaf.data.count_nonzero())}")

    assert_caught(gives_the_same_of_meta_tensors, without_zeros, drawn_trees())


@pytest.mark.parametrize("dtype", ["quint8", "complex32", "uint4", "bits1x8", "float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_each_dtype_has_its_meta_tensor(dtype: str) -> None:
    kind = getattr(torch, dtype)
    shard = ShardedTensor("w", None, kind, (2, 3), (2, 3), (0, 0), None)
    [held] = st.without_data([shard], meta=True)
    assert (held.data.dtype, held.data.shape, held.data.is_meta) == (kind, (2, 3), True)
