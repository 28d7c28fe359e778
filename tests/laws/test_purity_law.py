"""No public function of the pure packages changes an argument; each has a call here, and a new one must get one."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree import (
    buffers,
    errors,
    fingerprints,
    geometry,
    layouts,
    lazy,
    lenses,
    mapping,
    objects,
    optim,
    pictures,
    plans,
    retention,
    traces,
    transforms,
    trees,
)
from shardtree.testing import check_pure, glu, random_bits

PURE = (
    *("errors", "geometry", "lazy", "mapping", "trees", "objects", "layouts", "lenses", "buffers", "optim"),
    *("transforms", "plans", "fingerprints", "retention", "pictures", "traces"),
)
EFFECTS = {"trees.register_nodes": "tells optree of our node types, which is what importing does"}

WEIGHT = st.ShardedTensor.from_rank_offsets("w", torch.arange(8.0).view(4, 2), (0, 1, 2))
COPY = replace(WEIGHT, replica_id=1)
FLAT = st.ShardedTensor.from_rank_offsets_flat("f", torch.arange(5.0), (4, 2), flattened_range=slice(2, 7))
OBJECT = st.ShardedObject("rng", {"seed": [1, 2]}, (2,), (1,))
FACTORY = glu("g", torch.arange(8.0).view(4, 2))
LOCAL = st.LocalNonpersistentObject([1])
TREE = {
    "model": {"w": WEIGHT, "f": [FLAT, None]},
    "rng": OBJECT,
    "g": FACTORY,
    "local": LOCAL,
    "step": 3,
    "t": (WEIGHT, 2),
}
BUILT = st.apply_factories(TREE)
STORED, SHARDS = st.trees.extract_sharded(TREE)[1], st.trees.extract_sharded(TREE)[0]
COLUMNS = st.layouts.shard_columns([WEIGHT, FLAT, COPY])
KIND = layouts.TensorKind(torch.int8, (2,), 0)
TOTALS = np.array([5, 6, 7], dtype=np.uint64)
OBJECTS = layouts.object_columns([OBJECT])
SOURCES = [st.ShardedObject("rng", [place], (3,), (place,)) for place in range(3)]
HELD = objects.held_arrays(SOURCES)
ARRAY = objects.ObjectArray("rng", (2,), ([1, 2], [3]))
EQUALS = objects.ObjectArray("rng", (2,), ({"seed": [1]}, {"seed": [1]}))
WHOLE = st.layouts.shard_columns(
    [replace(WEIGHT, local_shape=(8, 2), data=None, global_offset=(0, 0), axis_fragmentations=(1, 1))]
)


def whole(key: str) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, torch.arange(8.0).view(4, 2))


RESHARD = plans.plan_reshard([{"w": whole("w")}], [{}, {"w": whole("w")}])
FLAT_TREE = {key: whole(key) for key in ("l.0.w", "l.1.w")}
GATED = lenses.gate_and_up(tensor_parallel=2)
QKV = st.ShardedTensor.from_rank_offsets("w", torch.arange(6.0).view(3, 2), (0, 1, 2))
TWO_PARTS = lenses.grouped_runs(8, 2, (1, 3))
ONE_PART = lenses.joined_parts(TWO_PARTS)
ADDED = traces.trace(lambda given: {"w": given["w"] + given["w"].T}, {"w": torch.zeros(2, 2)})
TRACED = traces.trace(lambda given: {"w": given["w"].T.reshape(4, 2)}, {"w": WEIGHT.data})
LAZY = lazy.stored(lambda offset, shape: torch.full(shape, 7.0), (4, 2), torch.float32, name="w")

OPTIMIZER = {"state": {0: {"m": torch.ones(4, 2), "n": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
STORED_MOMENT = replace(WEIGHT, key="optimizer.state.m.w")
NAMED_OPTIMIZER = {"state": {"w": {"m": torch.ones(4, 2)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}


class OptState(NamedTuple):
    """A node of a tree."""

    w: Any
    step: Any


def column(*rows: Any) -> Any:
    return np.array(rows, dtype=np.int64)


CHUNKS = plans.StoredChunks(
    column(0, 0),
    column([0, 0], [4, 0]),
    column([4, 2], [4, 2]),
    column(-1, -1),
    column(-1, -1),
    column(0, 1),
    column(8, 8),
)
RUNS = plans.Runs(column(1, 0), column(0, 8), column(0, 1), column(0, 0), column(4, 4))
EXCHANGE = plans.plan_exchange(COLUMNS, 2)
KIND = layouts.TensorKind(torch.float16, (8, 2), 0)
STEPS = [retention.SavedStep(step, 60.0 * step, {"loss": 1 / step}, step == 2) for step in (3, 1, 2)]
MESH, SPEC = layouts.Mesh(dp=2, tp=2), layouts.PartitionSpec((layouts.AxisSplit("dp", 2), layouts.AxisSplit("tp")))
BUFFERS = buffers.plan_buffers({"w": WEIGHT}, data_parallel=3)
MATRICES = {"w": torch.arange(16.0).view(8, 2), "step": 3}
PARTS = layouts.mesh_shards((8, 2), MESH, SPEC)
GATED_WHOLE, DRAWN = whole("qkv"), pictures.layout_picture(WHOLE)
ERROR = errors.RemoteError("save: write", {1: "OSError: full"})


BOXES = (column(0, 0), column([0, 0], [1, 0]), column([2, 4], [2, 4]))
LOADED = {"g": [torch.ones(2, 2), torch.ones(2, 2)]}
ASKED = {"model": {"w": 1, "f": [2, 3]}, "rng": LOCAL, "t": (2, st.trees.HOLE)}


def raising(function: Callable[..., Any]) -> Callable[..., str]:
    def call(*args: Any, **options: Any) -> str:
        with pytest.raises(st.CheckpointingException) as caught:
            function(*args, **options)
        return str(caught.value)

    return call


def rebuilt(tree: Any) -> Any:
    pairs, rebuild = trees.flatten_with_paths(tree)
    return rebuild([leaf for _, leaf in pairs])


def merged(tree: Any) -> Any:
    built, merge = trees.build_factories(tree)
    return merge(trees.map_shards(lambda leaf: getattr(leaf, "data", leaf), built))


Call = tuple[Any, ...]
PREFIXED = plans.find_unexpected(["m.v", "m.w"], ["v", "w"])
NUMBERED = plans.find_unexpected(["optimizer.state.m.w"], ["optimizer.state.m.0"])
CALLS: dict[str, Call] = {
    "errors.attributes_of": (errors.attributes_of, ERROR),
    "errors.error_text": (errors.error_text, "load"),
    "errors.shorten": (errors.shorten, ["a", "b", "c"], 2),
    "errors.plural": (errors.plural, 2, "rank"),
    "errors.printable": (errors.printable, "a\n"),
    "errors.rank_text": (errors.rank_text, [0, 2, 3, 4]),
    "errors.render_path": (errors.render_path, ("a", 0)),
    "geometry.check_type": (geometry.check_type, "Mesh", "tp", 2, int, "Pass an int."),
    "geometry.slabs": (lambda shape, most: list(geometry.slabs(shape, most)), (3, 4), 5),
    "geometry.slices": (geometry.slices, (2, 0), (1, 4)),
    "lazy.lazy_map": (lambda whole: lazy.lazy_map(torch.neg, whole).shape, LAZY),
    "geometry.box_column": (geometry.box_column, [[4, 2], [3]], 1),
    "geometry.box_slices": (geometry.box_slices, column(0, 3), column(1, 2), 1),
    "geometry.narrowed": (geometry.narrowed, column([3, 4])),
    "geometry.as_int64": (geometry.as_int64, np.array([3, 4], dtype=np.int8)),
    "geometry.rows_of": (geometry.rows_of, plans.Runs(*(column([3, 4]) for _ in range(5))), column([0])),
    "geometry.joined_rows": (geometry.joined_rows, [plans.Runs(*(column([3, 4]) for _ in range(5)))] * 2),
    "geometry.widen": (geometry.widen, column([3, 4]), 3, 1),
    "geometry.volumes": (geometry.volumes, column([3, 4])),
    "geometry.row_major_strides": (geometry.row_major_strides, column([3, 4])),
    "geometry.intersect": (geometry.intersect, *(column([n, n], [2, 2]) for n in range(4))),
    "geometry.flat_boxes": (geometry.flat_boxes, column([3, 4]), column(2), column(9)),
    "geometry.coverage_faults": (geometry.coverage_faults, *BOXES[1:], (4, 4)),
    "geometry.carve_boxes": (geometry.carve_boxes, *BOXES[1:], column(0, 0), *BOXES[1:]),
    "geometry.held_elements": (geometry.held_elements, column(0, 1), column([2], [3]), 2),
    "geometry.overlapping_groups": (geometry.overlapping_groups, *BOXES, column(8)),
    "geometry.overlapping_pairs": (geometry.overlapping_pairs, *BOXES, *BOXES),
    "geometry.shared_groups": (geometry.shared_groups, *BOXES),
    "geometry.begins": (geometry.begins, column(1, 1, 2)),
    "geometry.distinct": (geometry.distinct, column(2, 1, 2)),
    "geometry.row_numbers": (lambda *columns: geometry.row_numbers(columns)[0], column(2, 1, 2), column(0, 0, 0)),
    "geometry.reach_of": (lambda *boxes: geometry.reach_of(*boxes).low, *BOXES),
    "geometry.rows_in_reach": (lambda *boxes: geometry.rows_in_reach(geometry.reach_of(*boxes), *boxes), *BOXES),
    "geometry.tiled_groups": (geometry.tiled_groups, *BOXES, 1),
    "mapping.is_main_replica": (mapping.is_main_replica, (0, 0)),
    "mapping.box_of": (mapping.box_of, "w", None, torch.float32, (4, 2), (2, 0), (2, 2)),
    "mapping.whole_tensors": (mapping.whole_tensors, ["w"], [torch.float32], [(4, 2)]),
    "mapping.with_data": (mapping.with_data, [WEIGHT], [None]),
    "mapping.with_keys": (mapping.with_keys, [WEIGHT], ["v"]),
    "lazy.computed": (lambda whole: lazy.computed(torch.mean, whole, (), torch.float32).read(), LAZY),
    "lazy.frozen_values": (
        lambda columns: lazy.frozen_values(mapping.ShardedObject, 1, columns),
        {name: [getattr(OBJECT, name)] for name in ("key", "data", "global_shape", "global_offset", "replica_id")},
    ),
    "lazy.stored_each": (lazy.stored_each, [lambda box: torch.zeros(2)], [(2,)], [torch.float32], ["w"]),
    "mapping.ShardedBase.validate_metadata_integrity": (mapping.ShardedTensor.validate_metadata_integrity, WEIGHT),
    "mapping.ShardedBase.without_data": (mapping.ShardedTensor.without_data, WEIGHT),
    "mapping.ShardedTensor.validate_metadata_integrity": (mapping.ShardedTensor.validate_metadata_integrity, FLAT),
    "mapping.ShardedTensor.from_rank_offsets": (st.ShardedTensor.from_rank_offsets, "w", WEIGHT.data, (0, 1, 2)),
    "mapping.ShardedTensor.from_rank_offsets_flat": (
        partial(st.ShardedTensor.from_rank_offsets_flat, flattened_range=slice(2, 7)), "f", FLAT.data, [4, 2]
    ),
    "mapping.ShardedTensor.global_slice": (st.ShardedTensor.global_slice, WEIGHT),
    "mapping.ShardedTensor.local_chunk_offset_in_global": (st.ShardedTensor.local_chunk_offset_in_global, WEIGHT),
    "mapping.ShardedTensor.max_allowed_chunks": (st.ShardedTensor.max_allowed_chunks, WEIGHT),
    "mapping.ShardedTensor.narrow": (st.ShardedTensor.narrow, FLAT, 1, 0, 1),
    "mapping.ShardedTensor.init_data": (st.ShardedTensor.init_data, WEIGHT.without_data(), "cpu", torch.zeros),
    "mapping.ShardedTensor.without_data": (st.ShardedTensor.without_data, WEIGHT),
    "mapping.ShardedObject.validate_metadata_integrity": (st.ShardedObject.validate_metadata_integrity, OBJECT),
    "mapping.ShardedObject.without_data": (st.ShardedObject.without_data, OBJECT),
    "mapping.ShardedObject.empty_from_unique_key": (st.ShardedObject.empty_from_unique_key, "rng/shard_1_2"),
    "mapping.ShardedTensorFactory.validate_metadata_integrity": (FACTORY.validate_metadata_integrity,),
    "mapping.ShardedTensorFactory.build": (st.ShardedTensorFactory.build, FACTORY),
    "mapping.ShardedTensorFactory.without_data": (st.ShardedTensorFactory.without_data, FACTORY),
    "mapping.LocalNonpersistentObject.unwrap": (st.LocalNonpersistentObject.unwrap, LOCAL),
    "lazy.stored": (lambda *args: lazy.stored(*args, name="w").fetches, LAZY.read_box, (4, 2), torch.float32),
    "lazy.Source.read_box": (LAZY.read_box, (0, 0), (1, 2)),
    "lazy.Source.box_fetches": (lambda: list(LAZY.box_fetches((0, 0), (1, 2))),),
    "lazy.LazyTensor.read": (LAZY.read,),
    "lazy.LazyTensor.read_box": (LAZY.read_box, (0, 0), (1, 2)),
    "lazy.LazyTensor.box_fetches": (lambda: list(LAZY.box_fetches((0, 0), (1, 2))),),
    "trees.value_at": (trees.value_at, {"lr": 0.1}, ("lr",)),
    "trees.compose": (lambda tree: trees.compose(trees.unbox, trees.without_data)(tree), TREE),
    "trees.bind": (lambda tree: trees.bind(trees.prefix, "p.")(tree), TREE),
    "trees.diff": (trees.diff, TREE, BUILT),
    "trees.cast": (trees.cast, TREE, torch.bfloat16),
    "trees.narrow": (trees.narrow, BUILT, 1, 0, 1),
    "trees.prefix": (trees.prefix, TREE, "p."),
    "trees.rename": (trees.rename, TREE, {"w": "v"}),
    "trees.unbox": (trees.unbox, TREE),
    "trees.rebox": (trees.rebox, TREE, trees.unbox(TREE)),
    "trees.without_data": (trees.without_data, TREE),
    "trees.with_data": (trees.with_data, WEIGHT, torch.zeros(4, 2)),
    "trees.apply_factories": (trees.apply_factories, TREE),
    "trees.apply_factory_merges": (trees.apply_factory_merges, LOADED, {"g": FACTORY}),
    "trees.build_factories": (merged, TREE),
    "trees.merge_anew": (trees.merge_anew, FACTORY, list(torch.zeros(2, 2, 2))),
    "trees.merge_into_held": (trees.merge_into_held, "load", TREE),
    "trees.common_with_holes": (trees.common_with_holes, TREE),
    "trees.join": (trees.join, trees.common_with_holes({**TREE, "model": {"f": [WEIGHT, st.trees.HOLE]}}), ASKED),
    "trees.comparable": (trees.comparable, trees.common_with_holes(TREE)),
    "trees.values_only": (trees.values_only, trees.common_with_holes(TREE)),
    "trees.is_hollow": (trees.is_hollow, trees.common_with_holes(TREE)),
    "trees.holds_tensors": (trees.holds_tensors, TREE),
    "trees.misfits": (trees.misfits, trees.common_with_holes(TREE), TREE),
    "trees.is_plain_tensor": (trees.is_plain_tensor, TREE),
    "trees.unfilled": (trees.unfilled, TREE, [(("model",), torch.zeros(2))]),
    "trees.deepest": (trees.deepest, trees.common_with_holes(TREE), ("model",)),
    "trees.left_out": (trees.left_out, trees.common_with_holes(TREE), {}),
    "trees.check_is_tree": (trees.check_is_tree, "load", TREE),
    "trees.is_subclass": (trees.is_subclass, TREE),
    "trees.megatron_kind": (trees.megatron_kind, WEIGHT),
    "trees.refuse_hidden": (trees.refuse_hidden, "load", trees.leaves_with_paths(TREE)),
    "trees.refuse_without_elements": (trees.refuse_without_elements, "load", trees.leaves_with_paths(TREE)),
    "trees.refuse_too_deep": (lambda doing: type(trees.refuse_too_deep(doing)), "load"),
    "trees.without_holes": (trees.without_holes, trees.common_with_holes(TREE)),
    "trees.prune": (trees.prune, trees.common_with_holes({**TREE, "model": {"f": [WEIGHT, st.trees.HOLE]}})),
    "trees.flat": (trees.flat, {"model": {"w": WEIGHT, "empty": {}}, "betas": [0.9]}),
    "trees.nested": (trees.nested, {"model.w": WEIGHT, "model.empty": {}, "betas": [0.9]}),
    "trees.checked_keys": (trees.checked_keys, "cast", ["l.*.w"]),
    "trees.full_data": (trees.full_data, [2], torch.float16, "cpu", 3),
    "trees.padding_like": (trees.padding_like, WEIGHT.data, [2], 3),
    "trees.as_integers": (trees.as_integers, WEIGHT.data),
    "trees.empty_data": (trees.empty_data, [0, 2], torch.complex32, "cpu"),
    "trees.join_data": (trees.join_data, torch.cat, [WEIGHT.data, WEIGHT.data], 0),
    "trees.map_sharing": (trees.map_sharing, lambda leaf: leaf, TREE),
    "trees.map_data": (trees.map_data, torch.neg, TREE),
    "trees.map_shards": (trees.map_shards, lambda leaf: leaf, TREE),
    "trees.combine": (trees.combine, SHARDS, STORED),
    "trees.merge": (trees.merge, {"a": {"b": 1}}, {"a": {"c": [2]}}),
    "trees.extract_metadata": (trees.extract_metadata, BUILT["model"]),
    "trees.extract_nonpersistent": (trees.extract_nonpersistent, TREE),
    "trees.extract_sharded": (trees.extract_sharded, TREE),
    "trees.call_at": (trees.call_at, ("l", 0), max, [3, 1]),
    "trees.namedtuple_types": (trees.namedtuple_types, {**TREE, "o": OptState(WEIGHT, [3])}),
    "trees.partition": (trees.partition, TREE, lambda leaf: leaf is None),
    "trees.leaves_with_paths": (trees.leaves_with_paths, TREE),
    "trees.flatten_with_paths": (rebuilt, TREE),
    "trees.shard_leaves": (trees.shard_leaves, TREE),
    "trees.restrict": (trees.restrict, TREE, BUILT),
    "trees.united": (trees.united, [trees.common_with_holes(TREE), {"step": 3, "own": {"lr": 0.1}}]),
    "trees.unite": (trees.unite, {0: trees.common_with_holes(TREE), 1: {"step": 3, "own": {"lr": 0.1}}}),
    "trees.select": (trees.select, TREE, "model.**"),
    "layouts.Mesh.on_ranks": (MESH.on_ranks, range(4, 8)),
    "layouts.Mesh.coordinates": (MESH.coordinates, 3),
    "layouts.Mesh.rank_at": (lambda mesh: mesh.rank_at(dp=1, tp=0), MESH),
    "layouts.check_spec": (layouts.check_spec, "w", KIND, MESH, SPEC),
    "layouts.mesh_shards": (layouts.mesh_shards, (8, 2), MESH, SPEC),
    "layouts.mesh_shard": (layouts.mesh_shard, (8, 2), MESH, SPEC, 1),
    "layouts.mesh_columns": (layouts.mesh_columns, {"w": KIND}, MESH, {"w": SPEC}),
    "layouts.rank_data": (layouts.rank_data, MATRICES["w"], PARTS[1]),
    "layouts.rank_leaf": (layouts.rank_leaf, "w", torch.zeros(2, 2), torch.float32, PARTS[1]),
    "layouts.shard": (layouts.shard, MATRICES, MESH, SPEC),
    "layouts.shard_at": (layouts.shard_at, MATRICES, MESH, {"w": SPEC}, 1),
    "layouts.abstract": (layouts.abstract, MATRICES, MESH, SPEC),
    "layouts.abstract_at": (layouts.abstract_at, MATRICES, MESH, SPEC, 1),
    "layouts.from_local": (layouts.from_local, MATRICES, MESH, SPEC, 1),
    "layouts.layout_of": (layouts.layout_of, MATRICES, MESH, SPEC),
    "layouts.specs_by_pattern": (lambda specs: layouts.specs_by_pattern(specs)("w", None), {"**": SPEC}),
    "layouts.unshard": (layouts.unshard, layouts.shard(MATRICES, MESH, SPEC)),
    "layouts.coverage": (layouts.coverage, [TREE, {"w": WEIGHT}]),
    "layouts.tree_columns": (layouts.tree_columns, [TREE, {"w": WEIGHT}]),
    "layouts.trees_by_rank": (layouts.trees_by_rank, [TREE, {"w": WEIGHT}]),
    "layouts.tensor_shards": (layouts.tensor_shards, TREE),
    "layouts.join_columns": (layouts.join_columns, [COLUMNS, COLUMNS]),
    "layouts.join_agreed": (layouts.join_agreed, [COLUMNS, COLUMNS]),
    "layouts.packed_kinds": (layouts.packed_kinds, COLUMNS.kinds),
    "layouts.unpacked_kinds": (layouts.unpacked_kinds, layouts.packed_kinds(COLUMNS.kinds)),
    "layouts.join_checked": (raising(layouts.join_checked), [COLUMNS, WHOLE], [OBJECTS]),
    "layouts.check_columns": (layouts.check_columns, "plan_load", COLUMNS),
    "layouts.select_rows": (layouts.select_rows, COLUMNS, column(1)),
    "layouts.shard_boxes": (layouts.shard_boxes, COLUMNS.offset, COLUMNS.shape, COLUMNS.start, COLUMNS.stop),
    "layouts.shard_columns": (layouts.shard_columns, [WEIGHT, FLAT]),
    "layouts.access_problems": (layouts.access_problems, COLUMNS),
    "layouts.check_stored_shards": (layouts.check_stored_shards, layouts.shard_columns([WEIGHT])),
    "layouts.write_problems": (layouts.write_problems, COLUMNS),
    "layouts.check_access": (raising(layouts.check_access), COLUMNS),
    "layouts.sharding_problems": (layouts.sharding_problems, [COLUMNS, WHOLE], [OBJECTS]),
    "layouts.kind_problems": (layouts.kind_problems, [COLUMNS, WHOLE], [OBJECTS]),
    "layouts.object_columns": (layouts.object_columns, [OBJECT]),
    "layouts.join_objects": (layouts.join_objects, [OBJECTS, OBJECTS]),
    "layouts.object_problems": (layouts.object_problems, OBJECTS),
    "layouts.common_problems": (layouts.common_problems, [{"a": [1]}, {"a": [2]}]),
    "layouts.raise_problems": (raising(layouts.raise_problems), layouts.access_problems(COLUMNS)),
    "layouts.sharding_faults": (layouts.sharding_faults, COLUMNS),
    "layouts.doubled_faults": (layouts.doubled_faults, COLUMNS),
    "layouts.select_faults": (layouts.select_faults, layouts.sharding_faults(COLUMNS), column(0)),
    "layouts.splits": (lambda entry: list(layouts.splits(entry)), ("dp", "tp")),
    "layouts.place_text": (layouts.place_text, (slice(0, 2),), slice(0, 1)),
    "layouts.problem_lines": (layouts.problem_lines, list(layouts.access_problems(COLUMNS))),
    "objects.reshard_objects": (objects.reshard_objects, SOURCES, [OBJECT], {"rng": objects.concatenate_objects}),
    "objects.replicate_objects": (objects.replicate_objects, EQUALS, (3,)),
    "objects.replicate_cell": (lambda array: objects.replicate_cell((1,))(array, (3,)), ARRAY),
    "objects.concatenate_objects": (objects.concatenate_objects, ARRAY, (3,)),
    "objects.redistribute_objects": (objects.redistribute_objects, ARRAY, (3,)),
    "objects.own_copy": (objects.own_copy, [ARRAY], "an object"),
    "objects.drop_objects": (objects.drop_objects, ARRAY, (3,)),
    "objects.fold_objects": (lambda array: objects.fold_objects(operator.iadd)(array, (3,)), ARRAY),
    "objects.rules_by_field": (
        lambda rules, array: objects.rules_by_field(rules)(array, (3,)), {"seed": objects.drop_objects}, EQUALS
    ),
    "objects.ObjectArray.cell_text": (ARRAY.cell_text, 1),
    "objects.held_arrays": (lambda items: objects.held_arrays(items)["rng"].shapes, SOURCES),
    "objects.HeldArrays.shape_as": (HELD["rng"].shape_as, (3,)),
    "objects.HeldArrays.whole": (lambda key, shape: HELD[key].whole(key, shape).values, "rng", (3,)),
    "objects.reshaped_arrays": (objects.reshaped_arrays, HELD, [OBJECT]),
    "objects.objects_by_rule": (objects.objects_by_rule, HELD, [OBJECT], {"rng": objects.concatenate_objects}),
    "objects.rules_by_key": (objects.rules_by_key, "load", {"r*": objects.drop_objects}, ["rng"]),
    "objects.check_ruled": (objects.check_ruled, [objects.ShapeChange("rng", ((1,),), (2,))], {"rng": max}),
    "layouts.chunk_grids": (
        layouts.chunk_grids, column(0, 0), column([0], [2]), column([2], [2]), column(-1, -1), column(1)
    ),
    "transforms.partial_rename": (transforms.partial_rename, FLAT_TREE, {"l.*.w": "m.*.w"}),
    "transforms.keep_layers": (transforms.keep_layers, FLAT_TREE, "l", [1]),
    "transforms.stack_layers": (transforms.stack_layers, FLAT_TREE, "l"),
    "transforms.unstack_layers": (transforms.unstack_layers, {"s.w": whole("s.w")}, "s"),
    "transforms.split_tensor": (transforms.split_tensor, FLAT_TREE, "l.0.w", ["a", "b"]),
    "transforms.merge_tensors": (transforms.merge_tensors, FLAT_TREE, ["l.0.w", "l.1.w"], "w"),
    "transforms.unpad_tensors": (transforms.unpad_tensors, FLAT_TREE, ["l.*.w"], 1),
    "transforms.pad_tensors": (transforms.pad_tensors, FLAT_TREE, ["l.*.w"], 30),
    "transforms.transpose_tensors": (transforms.transpose_tensors, FLAT_TREE, ["l.*.w"]),
    "lazy.covering": (lazy.covering, lazy.Strided(8, (3, 2), (1, 6)), (4, 6)),
    "lazy.of_source": (lambda data: lazy.of_source(data).shape, LAZY),
    "traces.trace": (lambda given: traces.trace(dict, given).reads(), {"w": WEIGHT.data}),
    "traces.Trace.narrow": (TRACED.narrow, {"w": ((0, 0), (1, 2))}),
    "traces.Trace.reads": (TRACED.reads,),
    "traces.Trace.then": (TRACED.then, TRACED),
    "traces.Trace.inverse": (TRACED.inverse,),
    "traces.Trace.check": (TRACED.check, TRACED),
    "traces.Trace.diff": (TRACED.diff, TRACED),
    "traces.Moves.find": (TRACED.moves["w"].find, [traces.Move(None, 0, 3, ((2, 1, 1),))]),
    "traces.localized": (lambda trace: traces.localized(trace, "w", (1, 0), (2, 2)).boxes, TRACED),
    "traces.Local.made": (traces.localized(TRACED, "w", (0, 0), (4, 2)).made, [WEIGHT.data]),
    "traces.check_written": (traces.check_written, TRACED, "w", "load"),
    "traces.whole_shard": (traces.whole_shard, "w", TRACED.outputs["w"]),
    "traces.transformed": (
        lambda trace, tree: traces.transformed(trace, tree, "open")["w"].data.read(),
        TRACED,
        {"w": st.ShardedTensor("w", LAZY, LAZY.dtype, (4, 2), (4, 2), (0, 0), (1, 1))},
    ),
    "traces.Moves.near": (TRACED.moves["w"].near, 0, 3),
    "traces.axis_of": (traces.axis_of, 2, (4, 2)),
    "traces.factored": (traces.factored, TRACED.moves["w"][0], (4, 2), (2, 4)),
    "traces.view_of": (traces.view_of, traces.Move("w", 0, 0, ((8, 1, 1),)), traces.Box((0, 0), (4, 2)), (4, 2)),
    "traces.coverage": (traces.coverage, [traces.Move(None, 0, 3, ((2, 1, 1),))], 8),
    "lenses.from_function": (lambda shard: lenses.from_function(lambda w: w.T)(shard).shards, WEIGHT),
    "lenses.through_trace": (lambda tree, trace: lenses.through_trace(tree, trace)["w"].key, {"w": WEIGHT}, TRACED),
    "lenses.as_factory": (lambda shard: lenses.as_factory(shard, GATED).build()["0"], FLAT),
    "lenses.factories_by_pattern": (
        lambda tree: lenses.factories_by_pattern(tree, {"**": GATED})["w"].build()["0"], {"w": WEIGHT}
    ),
    "lenses.compose": (lambda shard: lenses.compose(GATED, GATED)(shard).shards, WEIGHT),
    "lenses.by_pattern": (lambda each, shard: lenses.by_pattern(each)(shard).shards, {"**": GATED}, WEIGHT),
    "lenses.gate_and_up": (lambda shard: GATED(shard).shards, WEIGHT),
    "lenses.attention_qkv": (lambda shard: lenses.attention_qkv(heads=2, head_size=1)(shard).shards, QKV),
    "lenses.rotary_halves": (lambda shard: lenses.rotary_halves(head_size=4)(shard).shards, WEIGHT),
    "lenses.rotary_pairs": (lambda shard: lenses.rotary_pairs(head_size=4)(shard).shards, WEIGHT),
    "lenses.transposed": (lambda shard: lenses.transposed()(shard).shards, WEIGHT),
    "lenses.rearranged": (lambda shard: lenses.rearranged("(a b) c -> c b a", a=2)(shard).shards, WEIGHT),
    "lenses.stacked_layers": (
        lambda shard: lenses.stacked_layers("l", 2)(shard).shards, FLAT_TREE["l.0.w"]
    ),
    "lenses.unstacked_layers": (lambda shard: lenses.unstacked_layers("w")(shard).shards, WEIGHT),
    "lenses.expert_stack": (lambda shard: lenses.expert_stack(experts=2)(shard).shards, WEIGHT),
    "lenses.expert_keys": (lambda shard: lenses.expert_keys("w", experts=2)(shard).shards, WEIGHT),
    "lenses.padded_axis": (lambda shard: lenses.padded_axis(6)(shard).shards, WEIGHT),
    "lenses.tied": (lambda shard: lenses.tied("w", "v")(shard).shards, WEIGHT),
    "lenses.renamed": (lambda shard: lenses.renamed("w", "v")(shard).shards, WEIGHT),
    "lenses.mapped_axis": (
        lambda runs, shard: lenses.mapped_axis(0, lambda _: runs)(shard).shards, ONE_PART, WEIGHT
    ),
    "lenses.grouped_runs": (lenses.grouped_runs, 6, 2, [1, 2]),
    "lenses.joined_parts": (lenses.joined_parts, TWO_PARTS, [1, 0]),
    "buffers.plan_buffers": (partial(buffers.plan_buffers, data_parallel=3), {"w": WEIGHT}),
    "buffers.BufferPlan.ranges": (BUFFERS.ranges, 1),
    "buffers.BufferPlan.holders": (BUFFERS.holders, "w"),
    "buffers.BufferPlan.explain": (BUFFERS.explain, "w"),
    "buffers.flat_shards": (buffers.flat_shards, BUFFERS, 0, [torch.ones(3)], {"w": WEIGHT}),
    "buffers.flat_targets": (buffers.flat_targets, BUFFERS, 0, {"w": WEIGHT}),
    "buffers.slice_views": (buffers.slice_views, BUFFERS, 1, [torch.ones(3)]),
    "buffers.buffer_slices": (buffers.buffer_slices, BUFFERS, 1, {"w": torch.ones(3)}),
    "lenses.boxes_of": (lenses.boxes_of, FLAT),
    "lenses.flat_of": (lenses.flat_of, FLAT, [box.data for box in lenses.boxes_of(FLAT)]),
    "optim.get_param_id_to_sharded_param_map": (
        optim.get_param_id_to_sharded_param_map, TREE, [WEIGHT.data]
    ),
    "optim.get_param_id_to_name_map": (optim.get_param_id_to_name_map, [("w", WEIGHT.data)], [WEIGHT.data]),
    "optim.sharded_params_by_name": (optim.sharded_params_by_name, TREE),
    "optim.make_sharded_optimizer_tensor": (
        optim.make_sharded_optimizer_tensor, WEIGHT, torch.ones(4, 2), "optimizer.state.m"
    ),
    "optim.optim_state_to_sharding_state": (optim.optim_state_to_sharding_state, OPTIMIZER, {0: WEIGHT}),
    "optim.sharding_state_to_optim_state": (optim.sharding_state_to_optim_state, OPTIMIZER),
    "optim.abstract_optim_state": (
        optim.abstract_optim_state, OPTIMIZER, {0: WEIGHT}, {"m": torch.float32, "n": 0}
    ),
    "optim.abstract_optim_state_from_metadata": (
        optim.abstract_optim_state_from_metadata, OPTIMIZER, {0: WEIGHT}, {"m": STORED_MOMENT}
    ),
    "optim.optim_state_by_name": (optim.optim_state_by_name, OPTIMIZER, {0: "w"}),
    "optim.optim_state_by_id": (optim.optim_state_by_id, NAMED_OPTIMIZER, {0: "w"}),
    "optim.regroup_optim_state": (optim.regroup_optim_state, NAMED_OPTIMIZER, [{"params": ["w"]}]),
    "optim.per_parameter": (optim.per_parameter, WEIGHT, "step", torch.tensor(3.0)),
    "optim.along": (lambda *args: optim.along(0, None)(*args), WEIGHT, "pairs", torch.ones(4, 5)),
    "optim.square_preconditioners": (
        lambda *args: optim.square_preconditioners(where_cut="own")["Q"](*args), WEIGHT, "Q", torch.eye(4)
    ),
    "optim.on_mesh": (
        lambda *args: optim.on_mesh(MESH, layouts.PartitionSpec("dp"), 1)(*args), WEIGHT, "k", torch.eye(4)
    ),
    "optim.OptimizerState.of": (optim.OptimizerState.of, torch.ones(3)),
    "optim.OptimizerState.axes": (optim.OptimizerState.of(torch.ones(3)).axes, 0),
    "optim.OptimizerState.own_sizes": (optim.OptimizerState.of(torch.ones(3)).own_sizes, 0),
    "optim.one_per_parameter": (optim.one_per_parameter, WEIGHT, "code", torch.ones(3)),
    "optim.one_per_shard": (optim.one_per_shard, WEIGHT, "seed", torch.ones(3)),
    "optim.reduced_axis": (lambda *args: optim.reduced_axis(-1)(*args), WEIGHT, "row", torch.ones(4)),
    "optim.adafactor_rules": (
        lambda *args: optim.adafactor_rules()["row_var"](*args), WEIGHT, "row_var", torch.ones(4, 1)
    ),
    "optim.block_scales": (lambda *args: optim.block_scales(4)(*args), WEIGHT, "absmax", torch.ones(2)),
    "plans.held_places": (plans.held_places, COLUMNS),
    "plans.plan_load": (plans.plan_load, WHOLE, CHUNKS),
    "plans.plan_exchange": (plans.plan_exchange, COLUMNS, 2),
    "plans.plan_reads": (plans.plan_reads, COLUMNS, 2),
    "plans.grouped": (lambda sizes: list(plans.grouped(sizes, int, 4)), [1, 2, 3]),
    "plans.runs_plan": (plans.runs_plan, RUNS),
    "plans.read_rounds": (plans.read_rounds, COLUMNS),
    "plans.near_names": (plans.near_names, ["v"], ["w"]),
    "plans.near_patterns": (plans.near_patterns, ["v", "*.w"], ["w", "a.b.w"]),
    "plans.differing_prefix": (plans.differing_prefix, ["m.v", "m.w"], ["v", "w"]),
    "plans.prefix_difference": (plans.prefix_difference, PREFIXED),
    "plans.misfit_lines": (plans.misfit_lines, PREFIXED),
    "plans.convertible": (plans.convertible, torch.float32, torch.int8),
    "plans.find_unexpected": (plans.find_unexpected, ["v"], ["w"]),
    "plans.size_text": (plans.size_text, 4096),
    "plans.wants_names": (plans.wants_names, *NUMBERED),
    "plans.find_mismatches": (plans.find_mismatches, [WEIGHT], {"w": KIND}),
    "plans.find_gaps": (plans.find_gaps, [WEIGHT], column(3), {"w": KIND}),
    "plans.overlaps": (plans.overlaps, FLAT, (2, 2)),
    "plans.stored_elements": (plans.stored_elements, WEIGHT, (6, 1)),
    "plans.Overlap.of": (lambda overlap, data: overlap.of(data), plans.overlaps(WEIGHT, (6, 1))[0], WEIGHT.data),
    "plans.plan_reshard": (plans.plan_reshard, [{"w": whole("w")}], [{}, {"w": whole("w")}]),
    "plans.with_relays": (plans.with_relays, RESHARD),
    "plans.peak_bytes": (plans.peak_bytes, RESHARD, RESHARD.schedule()),
    "plans.ReshardPlan.leaving": (plans.ReshardPlan.leaving, RESHARD, [0]),
    "plans.ReshardPlan.schedule": (plans.ReshardPlan.schedule, RESHARD),
    "plans.ReshardPlan.check": (plans.ReshardPlan.check, RESHARD),
    "plans.ReshardPlan.explain": (plans.ReshardPlan.explain, RESHARD, "w"),
    "plans.ReshardPlan.inverse": (plans.ReshardPlan.inverse, RESHARD),
    "plans.ReshardPlan.to_json": (plans.ReshardPlan.to_json, RESHARD),
    "plans.ReshardPlan.from_json": (plans.ReshardPlan.from_json, RESHARD.to_json()),
    "plans.reshard": (plans.reshard, [{"w": whole("w"), "g": FACTORY, "local": LOCAL, "step": 3}], [{"w": whole("w")}]),
    "plans.take_source": (plans.take_source, TREE),
    "plans.take_target": (plans.take_target, TREE),
    "plans.agreed_common": (plans.agreed_common, {0: trees.common_with_holes(TREE), 2: st.trees.HOLE}),
    "plans.complete": (plans.complete, plans.take_target({"w": WEIGHT}), {"step": 3}, [torch.zeros(4, 2)], []),
    "plans.level_writes": (plans.level_writes, COLUMNS, 2),
    "plans.main_writes": (plans.main_writes, COLUMNS),
    "fingerprints.axis_weights": (fingerprints.axis_weights, 1, 65_530, 65_540),
    "fingerprints.box_part": (fingerprints.box_part, KIND, torch.ones(2, 2), (2, 0)),
    "fingerprints.box_pieces": (lambda data: list(fingerprints.box_pieces(data, (2, 0), 4)), WEIGHT.data),
    "fingerprints.host_total": (fingerprints.host_total, column([3, 4]).view(np.uint64), (0, 1), (2, 0)),
    "fingerprints.device_total": (fingerprints.device_total, torch.arange(8).view(4, 2), (0, 1), (2, 0)),
    "fingerprints.box_total": (fingerprints.box_total, WEIGHT.data, (4, 0)),
    "fingerprints.run_total": (fingerprints.run_total, FLAT.data, (0, 0), (4, 2), 2),
    "fingerprints.shard_pieces": (lambda shard: list(fingerprints.shard_pieces(shard, 3)), FLAT),
    "fingerprints.run_pieces": (lambda data: list(fingerprints.run_pieces(data, (0, 0), (4, 2), 2, 3)), FLAT.data),
    "fingerprints.piece_total": (fingerprints.piece_total, fingerprints.ShardPiece(WEIGHT.data, (4, 0))),
    "fingerprints.shard_totals": (fingerprints.shard_totals, [WEIGHT, FLAT]),
    "fingerprints.shard_parts": (fingerprints.shard_parts, [WEIGHT, FLAT]),
    "fingerprints.column_parts": (fingerprints.column_parts, COLUMNS, TOTALS),
    "fingerprints.unlike_replicas": (fingerprints.unlike_replicas, COLUMNS, TOTALS),
    "fingerprints.bytes_total": (fingerprints.bytes_total, torch.arange(99, dtype=torch.uint8)),
    "fingerprints.main_shards": (fingerprints.main_shards, TREE),
    "fingerprints.partial_fingerprints": (fingerprints.partial_fingerprints, [WEIGHT, FLAT]),
    "fingerprints.add_fingerprints": (fingerprints.add_fingerprints, [fingerprints.partial_fingerprints([whole("w")])]),
    "fingerprints.tensor_fingerprint": (fingerprints.tensor_fingerprint, "w", KIND, 5),
    "retention.best_step": (retention.best_step, STEPS, "loss"),
    "retention.kept_steps": (lambda steps: retention.kept_steps(retention.keep_last(1), steps), STEPS),
    "retention.policy_name": (retention.policy_name, retention.keep_all()),
    "retention.whole_number": (lambda count: retention.whole_number("keep_last", "count", count, least=1), 2),
    "retention.duration": (retention.duration, "keep_for", 60),
    "retention.sorted_steps": (retention.sorted_steps, STEPS),
    "retention.keep_all": (lambda steps: retention.keep_all()(steps), STEPS),
    "retention.keep_any": (lambda steps: retention.keep_any(retention.keep_last(1))(steps), STEPS),
    "retention.keep_best": (lambda steps: retention.keep_best(1, "loss")(steps), STEPS),
    "retention.keep_every": (lambda steps: retention.keep_every(2)(steps), STEPS),
    "retention.keep_every_seconds": (lambda steps: retention.keep_every_seconds(90)(steps), STEPS),
    "retention.keep_for": (lambda steps: retention.keep_for(60)(steps), STEPS),
    "retention.keep_last": (lambda steps: retention.keep_last(2)(steps), STEPS),
    "retention.keep_steps": (lambda steps: retention.keep_steps([1])(steps), STEPS),
}  # fmt: skip
NUMBERS: dict[str, Call] = {
    "trees.stars": (trees.stars, "l.*.**"),
    "trees.path_key": (trees.path_key, ("l", 0)),
    "trees.match_keys": (trees.match_keys, "s", ["l.*"], ["l.a", "m"]),
    "trees.match_key": (trees.match_key, "l.*", "l.a"),
    "trees.key_matcher": (trees.key_matcher, ["l.*", "m"]),
    "trees.shell_differences": (trees.shell_differences, ["l.*"], ["l.a", "l.a.b"]),
    "trees.key_expression": (trees.key_expression, "l.*"),
    "trees.fill_key": (trees.fill_key, "l.**", ["a.b"]),
    "trees.check_stars": (trees.check_stars, "s", "l.*", ["m.*"]),
    "geometry.narrow_flat_range": (geometry.narrow_flat_range, (4, 2), 2, 7, 1, 0, 1),
    "geometry.cell_index": (geometry.cell_index, "w", (4, 2), (4, 0), (2, 1)),
    "geometry.cell_shape": (lambda *args: geometry.cell_shape(*args, padded=False), "w", (8, 2), (2, 1)),
    "geometry.check_box": (lambda *args: geometry.check_box(*args, may_leave=False), "w", (4, 2), (4, 0), (8, 2)),
    "geometry.check_cell": (geometry.check_cell, "w", (4, 2), (4, 0), (2, 1)),
    "geometry.check_flat_range": (geometry.check_flat_range, "w", slice(2, 7), (4, 2)),
    "geometry.check_lengths": (geometry.check_lengths, "w", (8, 2), (4, 0), (2, 1)),
    "geometry.check_ranks": (geometry.check_ranks, "w", (4, 2), (8, 2), 0),
    "geometry.cut_spans": (geometry.cut_spans, ((0, 8),), 2, 1, 2),
    "geometry.grid_cell": (geometry.grid_cell, "w", (4, 2), [(0, 1, 2)]),
    "geometry.narrow_axis": (geometry.narrow_axis, "w", "global_shape", (8, 2), 0, 4, 2),
    "geometry.narrow_place": (geometry.narrow_place, "w", (4, 2), -1, 0, 1),
    "geometry.flat_range": (geometry.flat_range, "w", slice(2, 7)),
    "geometry.integer": (geometry.integer, "w", "offset", 3),
    "geometry.integers": (geometry.integers, "w", "offset", [1, 2]),
    "geometry.refuse": (
        raising(partial(geometry.refuse, error=st.errors.ShapeError)),
        "w",
        "offset",
        3,
        "2",
        "Pass 2.",
    ),
    "pictures.details_html": (pictures.details_html, "more", "<p>it</p>"),
    "pictures.layout_picture": (pictures.layout_picture, COLUMNS),
    "pictures.tree_picture": (pictures.tree_picture, COLUMNS),
    "pictures.shard_picture": (pictures.shard_picture, WEIGHT),
    "pictures.stored_picture": (pictures.stored_picture, layouts.StoredLayout(COLUMNS, ("a.bin",))),
    "pictures.mesh_picture": (pictures.mesh_picture, MESH, SPEC, (8, 2)),
    "pictures.lens_picture": (pictures.lens_picture, GATED, [GATED_WHOLE]),
    "pictures.factory_picture": (pictures.factory_picture, FACTORY),
    "pictures.plan_picture": (pictures.plan_picture, RESHARD),
    "pictures.schedule_picture": (pictures.schedule_picture, RESHARD.schedule()),
    "pictures.series_picture": (pictures.series_picture, STEPS, retention.keep_last(1)),
    "pictures.moment_text": (pictures.moment_text, 1.0),
    "pictures.svg_of": (pictures.svg_of, DRAWN),
    "pictures.text_of": (pictures.text_of, DRAWN),
    "pictures.page_of": (pictures.page_of, DRAWN),
    "pictures.figure_html": (pictures.figure_html, DRAWN),
    "pictures.picture_lines": (pictures.picture_lines, DRAWN),
    "pictures.cell_lines": (lambda plane: pictures.cell_lines(plane, 8, 4, filled=True), DRAWN.rows[0][0]),
    "lenses.through_traces": (
        lambda trees, trace: lenses.through_traces(trees, trace)[0]["w"].key,
        [{"w": WEIGHT}],
        TRACED,
    ),
    "pictures.trace_picture": (pictures.trace_picture, TRACED),
    "fingerprints.bytes_total": (fingerprints.bytes_total, torch.arange(20, dtype=torch.uint8)),
    "pictures.html_page": (pictures.html_page, "title", ["<p></p>"]),
    "pictures.table_html": (pictures.table_html, ["key"], [["w"]]),
    "pictures.element_html": (pictures.element_html, "p", "text"),
    "pictures.text_html": (pictures.text_html, "a<b"),
}
VALUES: dict[str, Any] = {
    "traces.Kind": TRACED.outputs["w"],
    "traces.Computed": ADDED.moves["w"][0].root,
    "traces.Move": TRACED.moves["w"][0],
    "traces.Moves": TRACED.moves["w"],
    "lazy.Fetch": LAZY.fetches[0],
    "layouts.Mesh": MESH,
    "layouts.P": SPEC,
    "layouts.PartitionSpec": SPEC,
    "layouts.RankShard": PARTS[1],
    "layouts.Coverage": layouts.coverage([TREE]),
    "buffers.BufferPlan": BUFFERS,
    "buffers.BufferPlace": BUFFERS.places[0],
    "lenses.AxisRuns": ONE_PART,
    "lazy.LazyTensor": LAZY,
    "mapping.ShardedTensor": WEIGHT,
    "mapping.ShardedObject": OBJECT,
    "layouts.ShardColumns": COLUMNS,
    "objects.ObjectArray": ARRAY,
    "objects.HeldArrays": HELD["rng"],
    "plans.ExchangePlan": EXCHANGE,
    "plans.SharedReads": EXCHANGE.shared,
    "plans.ReshardPlan": RESHARD,
    "plans.TargetTree": plans.take_target(TREE),
    "plans.Schedule": RESHARD.schedule(),
    "plans.Provenance": RESHARD.explain("w"),
    "plans.LoadPlan": plans.plan_load(WHOLE, CHUNKS),
    "plans.ReadCost": plans.ReadCost(1, 2, 1, 1),
    "plans.Unexpected": PREFIXED[0],
    "plans.PrefixDifference": plans.prefix_difference(PREFIXED),
    "plans.Explanation": plans.Explanation(("v",), (), (plans.RankReads(0, 1, 0, plans.ReadCost(1, 2, 1, 1)),)),
}
EVERY = CALLS | NUMBERS


def public(package: str) -> dict[str, Any]:
    """Return what a package has to be called: its functions, and the methods and properties of its classes."""
    found: dict[str, Any] = {}
    for name, value in vars(importlib.import_module(f"shardtree.{package}")).items():
        if name.startswith("_") or not getattr(value, "__module__", "").startswith(f"shardtree.{package}"):
            continue
        if inspect.isfunction(value):
            found[f"{package}.{name}"] = value
        elif inspect.isclass(value):
            members = vars(value).items()
            found |= {f"{package}.{name}.{member}": own for member, own in members if not member.startswith("_")}
    callables = (property, classmethod, staticmethod)
    return {name: value for name, value in found.items() if inspect.isfunction(value) or isinstance(value, callables)}


PUBLIC = {
    name: value for package in PURE if find_spec(f"shardtree.{package}") for name, value in public(package).items()
}
FUNCTIONS = {name for name, value in PUBLIC.items() if not isinstance(value, property)}
PROPERTIES = [name for name in PUBLIC if name not in FUNCTIONS]


@pytest.mark.parametrize("name", EVERY)
def test_no_public_function_changes_an_argument(name: str) -> None:
    function, *args = EVERY[name]
    check_pure(function, *args)


@pytest.mark.parametrize("name", PROPERTIES)
def test_no_property_changes_its_value(name: str) -> None:
    package, kind, member = name.split(".")
    value = VALUES.get(f"{package}.{kind}", LAZY if kind == "Source" else None)
    assert value is not None, f"{name}: give VALUES a value of {package}.{kind}"
    if member in {"T", "mT"}:
        assert getattr(value, member).shape == value.shape[::-1]
    else:
        check_pure(lambda value: getattr(value, member), value)


def without_a_call(functions: set[str]) -> set[str]:
    return functions - EVERY.keys() - EFFECTS.keys()


def test_every_public_function_has_a_call() -> None:
    assert without_a_call(FUNCTIONS) == set(), "add a call to CALLS"
    assert EVERY.keys() - FUNCTIONS == set(), "these aren't public any more"


def test_a_function_without_a_call_is_found() -> None:
    assert without_a_call({*FUNCTIONS, "trees.new"}) == {"trees.new"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda tree: tree["model"].pop("f"), r"argument\['model'\]"),
        (lambda tree: tree["model"]["f"].append(1), r"argument\['model'\]\['f'\]\[2\]"),
        (lambda tree: tree["model"].update(w=WEIGHT.without_data()), r"argument\['model'\]\['w'\]"),
        (lambda tree: tree["model"].update({"w": tree["model"].pop("w")}), "argument"),
        (lambda tree: tree["t"].add_(0), r"argument\['t'\]"),
        (lambda tree: tree["t"].numpy().fill(3), "a value inside it"),
        (lambda tree: tree["n"].fill(3), "a value inside it"),
        (lambda tree, count=[0]: count.append(1) or len(count), "returned another value"),
    ],
)
def test_the_checker_catches(fault: Callable[[Any], Any], message: str) -> None:
    tree = {"model": {"w": WEIGHT, "f": [FLAT, None]}, "t": random_bits((3,), torch.float32), "n": np.zeros(2)}
    with pytest.raises(AssertionError, match=message):
        check_pure(fault, tree)
