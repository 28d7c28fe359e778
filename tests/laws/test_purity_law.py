"""No public function of the pure packages changes an argument; each has a call here, and a new one must get one.

Public is what a room's `__all__` names, and the root.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree import (
    buffers,
    fingerprints,
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
OBJECTS = layouts.object_columns([OBJECT])
SOURCES = [st.ShardedObject("rng", [place], (3,), (place,)) for place in range(3)]
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
TRACED = traces.trace(lambda given: {"w": given["w"].T.reshape(4, 2)}, {"w": WEIGHT.data})
LAZY = lazy.stored(lambda offset, shape: torch.full(shape, 7.0), (4, 2), torch.float32, name="w")

OPTIMIZER = {"state": {0: {"m": torch.ones(4, 2), "n": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
STORED_MOMENT = replace(WEIGHT, key="optimizer.state.m.w")
NAMED_OPTIMIZER = {"state": {"w": {"m": torch.ones(4, 2)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}


KIND = layouts.TensorKind(torch.float16, (8, 2), 0)
STEPS = [retention.SavedStep(step, 60.0 * step, {"loss": 1 / step}, step == 2) for step in (3, 1, 2)]
MESH, SPEC = layouts.Mesh(dp=2, tp=2), layouts.PartitionSpec((layouts.AxisSplit("dp", 2), layouts.AxisSplit("tp")))
BUFFERS = buffers.plan_buffers({"w": WEIGHT}, data_parallel=3)
MATRICES = {"w": torch.arange(16.0).view(8, 2), "step": 3}
PARTS = layouts.mesh_shards((8, 2), MESH, SPEC)
GATED_WHOLE, DRAWN = whole("qkv"), pictures.layout_picture(WHOLE)


LOADED = {"g": [torch.ones(2, 2), torch.ones(2, 2)]}


def raising(function: Callable[..., Any]) -> Callable[..., str]:
    def call(*args: Any, **options: Any) -> str:
        with pytest.raises(st.CheckpointingException) as caught:
            function(*args, **options)
        return str(caught.value)

    return call


def rebuilt(tree: Any) -> Any:
    pairs, rebuild = trees.flatten_with_paths(tree)
    return rebuild([leaf for _, leaf in pairs])


Call = tuple[Any, ...]
PREFIXED = plans.find_unexpected(["m.v", "m.w"], ["v", "w"])
CALLS: dict[str, Call] = {
    "lazy.lazy_map": (lambda whole: lazy.lazy_map(torch.neg, whole).shape, LAZY),
    "mapping.is_main_replica": (mapping.is_main_replica, (0, 0)),
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
    "lazy.LazyTensor.read": (LAZY.read,),
    "lazy.LazyTensor.read_box": (LAZY.read_box, (0, 0), (1, 2)),
    "lazy.LazyTensor.box_fetches": (lambda: list(LAZY.box_fetches((0, 0), (1, 2))),),
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
    "trees.apply_factories": (trees.apply_factories, TREE),
    "trees.apply_factory_merges": (trees.apply_factory_merges, LOADED, {"g": FACTORY}),
    "trees.flat": (trees.flat, {"model": {"w": WEIGHT, "empty": {}}, "betas": [0.9]}),
    "trees.nested": (trees.nested, {"model.w": WEIGHT, "model.empty": {}, "betas": [0.9]}),
    "trees.map_data": (trees.map_data, torch.neg, TREE),
    "trees.map_shards": (trees.map_shards, lambda leaf: leaf, TREE),
    "trees.combine": (trees.combine, SHARDS, STORED),
    "trees.merge": (trees.merge, {"a": {"b": 1}}, {"a": {"c": [2]}}),
    "trees.extract_metadata": (trees.extract_metadata, BUILT["model"]),
    "trees.extract_nonpersistent": (trees.extract_nonpersistent, TREE),
    "trees.extract_sharded": (trees.extract_sharded, TREE),
    "trees.partition": (trees.partition, TREE, lambda leaf: leaf is None),
    "trees.leaves_with_paths": (trees.leaves_with_paths, TREE),
    "trees.flatten_with_paths": (rebuilt, TREE),
    "trees.restrict": (trees.restrict, TREE, BUILT),
    "trees.select": (trees.select, TREE, "model.**"),
    "layouts.Mesh.on_ranks": (MESH.on_ranks, range(4, 8)),
    "layouts.Mesh.coordinates": (MESH.coordinates, 3),
    "layouts.Mesh.rank_at": (lambda mesh: mesh.rank_at(dp=1, tp=0), MESH),
    "layouts.mesh_shards": (layouts.mesh_shards, (8, 2), MESH, SPEC),
    "layouts.mesh_columns": (layouts.mesh_columns, {"w": KIND}, MESH, {"w": SPEC}),
    "layouts.shard": (layouts.shard, MATRICES, MESH, SPEC),
    "layouts.shard_at": (layouts.shard_at, MATRICES, MESH, {"w": SPEC}, 1),
    "layouts.abstract": (layouts.abstract, MATRICES, MESH, SPEC),
    "layouts.abstract_at": (layouts.abstract_at, MATRICES, MESH, SPEC, 1),
    "layouts.from_local": (layouts.from_local, MATRICES, MESH, SPEC, 1),
    "layouts.layout_of": (layouts.layout_of, MATRICES, MESH, SPEC),
    "layouts.specs_by_pattern": (lambda specs: layouts.specs_by_pattern(specs)("w", None), {"**": SPEC}),
    "layouts.unshard": (layouts.unshard, layouts.shard(MATRICES, MESH, SPEC)),
    "layouts.coverage": (layouts.coverage, [TREE, {"w": WEIGHT}]),
    "layouts.join_columns": (layouts.join_columns, [COLUMNS, COLUMNS]),
    "layouts.shard_columns": (layouts.shard_columns, [WEIGHT, FLAT]),
    "layouts.check_access": (raising(layouts.check_access), COLUMNS),
    "layouts.sharding_problems": (layouts.sharding_problems, [COLUMNS, WHOLE], [OBJECTS]),
    "layouts.object_columns": (layouts.object_columns, [OBJECT]),
    "objects.reshard_objects": (objects.reshard_objects, SOURCES, [OBJECT], {"rng": objects.concatenate_objects}),
    "objects.replicate_objects": (objects.replicate_objects, EQUALS, (3,)),
    "objects.replicate_cell": (lambda array: objects.replicate_cell((1,))(array, (3,)), ARRAY),
    "objects.concatenate_objects": (objects.concatenate_objects, ARRAY, (3,)),
    "objects.redistribute_objects": (objects.redistribute_objects, ARRAY, (3,)),
    "objects.drop_objects": (objects.drop_objects, ARRAY, (3,)),
    "objects.fold_objects": (lambda array: objects.fold_objects(operator.iadd)(array, (3,)), ARRAY),
    "objects.rules_by_field": (
        lambda rules, array: objects.rules_by_field(rules)(array, (3,)), {"seed": objects.drop_objects}, EQUALS
    ),
    "objects.ObjectArray.cell_text": (ARRAY.cell_text, 1),
    "transforms.partial_rename": (transforms.partial_rename, FLAT_TREE, {"l.*.w": "m.*.w"}),
    "transforms.keep_layers": (transforms.keep_layers, FLAT_TREE, "l", [1]),
    "transforms.stack_layers": (transforms.stack_layers, FLAT_TREE, "l"),
    "transforms.unstack_layers": (transforms.unstack_layers, {"s.w": whole("s.w")}, "s"),
    "transforms.split_tensor": (transforms.split_tensor, FLAT_TREE, "l.0.w", ["a", "b"]),
    "transforms.merge_tensors": (transforms.merge_tensors, FLAT_TREE, ["l.0.w", "l.1.w"], "w"),
    "transforms.unpad_tensors": (transforms.unpad_tensors, FLAT_TREE, ["l.*.w"], 1),
    "transforms.pad_tensors": (transforms.pad_tensors, FLAT_TREE, ["l.*.w"], 30),
    "transforms.transpose_tensors": (transforms.transpose_tensors, FLAT_TREE, ["l.*.w"]),
    "traces.trace": (lambda given: traces.trace(dict, given).reads(), {"w": WEIGHT.data}),
    "traces.Trace.narrow": (TRACED.narrow, {"w": ((0, 0), (1, 2))}),
    "traces.Trace.reads": (TRACED.reads,),
    "traces.Trace.then": (TRACED.then, TRACED),
    "traces.Trace.inverse": (TRACED.inverse,),
    "traces.Trace.check": (TRACED.check, TRACED),
    "traces.Trace.diff": (TRACED.diff, TRACED),
    "traces.Moves.find": (TRACED.moves["w"].find, [traces.Move(None, 0, 3, ((2, 1, 1),))]),
    "traces.Moves.near": (TRACED.moves["w"].near, 0, 3),
    "lenses.from_function": (lambda shard: lenses.from_function(lambda w: w.T)(shard).shards, WEIGHT),
    "lenses.through_trace": (lambda tree, trace: lenses.through_trace(tree, trace)["w"].key, {"w": WEIGHT}, TRACED),
    "lenses.as_factory": (lambda shard: lenses.as_factory(shard, GATED).build()["0"], FLAT),
    "lenses.factories_by_pattern": (
        lambda tree: lenses.factories_by_pattern(tree, {"**": GATED})["w"].build()["0"], {"w": WEIGHT}
    ),
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
    "fingerprints.partial_fingerprints": (fingerprints.partial_fingerprints, [WEIGHT, FLAT]),
    "fingerprints.add_fingerprints": (fingerprints.add_fingerprints, [fingerprints.partial_fingerprints([whole("w")])]),
    "retention.best_step": (retention.best_step, STEPS, "loss"),
    "retention.kept_steps": (lambda steps: retention.kept_steps(retention.keep_last(1), steps), STEPS),
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
    "pictures.layout_picture": (pictures.layout_picture, COLUMNS),
    "pictures.svg_of": (pictures.svg_of, DRAWN),
    "pictures.text_of": (pictures.text_of, DRAWN),
}
VALUES: dict[str, Any] = {
    "traces.Kind": TRACED.outputs["w"],
    "traces.Move": TRACED.moves["w"][0],
    "traces.Moves": TRACED.moves["w"],
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
    "plans.ReshardPlan": RESHARD,
    "plans.Schedule": RESHARD.schedule(),
    "plans.Provenance": RESHARD.explain("w"),
    "plans.ReadCost": plans.ReadCost(1, 2, 1, 1),
    "plans.Unexpected": PREFIXED[0],
    "plans.Explanation": plans.Explanation(("v",), (), (plans.RankReads(0, 1, 0, plans.ReadCost(1, 2, 1, 1)),)),
}
EVERY = CALLS | NUMBERS


def public(package: str) -> dict[str, Any]:
    """Return what users call of a package: its functions, and the methods and properties of its classes."""
    found: dict[str, Any] = {}
    room = importlib.import_module(f"shardtree.{package}")
    for name, value in vars(room).items():
        # What one room has for another is held by what users call.
        named = name in getattr(room, "__all__", ()) or getattr(st, name, None) is value
        if not named or not getattr(value, "__module__", "").startswith(f"shardtree.{package}"):
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
    return functions - EVERY.keys()


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
