"""What the errors of layouts say, to the letter: what, where, found, expected and what to do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardtree.core.layouts import held_arrays, raise_problems, trees_by_rank
from shardtree.layouts import (
    AxisSplit,
    Mesh,
    PartitionSpec,
    TensorKind,
    check_access,
    join_columns,
    layout_of,
    mesh_columns,
    object_columns,
    shard,
    shard_columns,
    sharding_problems,
    specs_by_pattern,
    unshard,
)
from shardtree.mapping import ShardedObject, ShardedTensor
from shardtree.meshes import check_spec, mesh_shard, placed_columns, rank_leaf
from shardtree.meshes._placement import Placement
from shardtree.objects import (
    ObjectArray,
    concatenate_objects,
    fold_objects,
    redistribute_objects,
    replicate_cell,
    replicate_objects,
    reshard_objects,
    rules_by_field,
)
from shardtree.trees import HOLE
from tests.core.trees.messages import read_messages, said

FULL = torch.arange(24.0).reshape(4, 6)
MESH, ROWS = Mesh(dp=2, tp=2), PartitionSpec("tp")


def part(index: int, count: int, key: str = "w", replica_id: int = 0, axis: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(
        key, FULL.chunk(count, axis)[index], (axis, index, count), replica_id=replica_id
    )


def flat(start: int, stop: int, replica_id: int = 0) -> ShardedTensor:
    data = torch.zeros(stop - start)
    return ShardedTensor.from_rank_offsets_flat(
        "flat", data, (4, 6), replica_id=replica_id, flattened_range=slice(start, stop)
    )


def cell(
    *index: int, of: tuple[int, ...] = (2,), value: Any = 1, key: str = "rng", replica_id: int = 0
) -> ShardedObject:
    return ShardedObject(key, value, of, index, replica_id)


def array(*values: Any, key: str = "rng") -> ObjectArray:
    return ObjectArray(key, (len(values),), values)


def fields(*values: Any, **rules: Any) -> Any:
    return rules_by_field(rules)(array(*values), (1,))


def ranks(*shards: ShardedTensor) -> Any:
    return [{one.key: one} for one in shards]


def access(*shards: ShardedTensor) -> None:
    check_access(join_columns([shard_columns([one], rank) for rank, one in enumerate(shards)]))


def objects(*items: ShardedObject) -> None:
    raise_problems(sharding_problems([], [object_columns([one], rank) for rank, one in enumerate(items)]))


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("held by another thread")


BLOCKS = mesh_shard((8, 6), Mesh(tp=2), PartitionSpec((AxisSplit("tp", 2),)), 0)
TALL = ShardedTensor.from_rank_offsets("w", torch.zeros(8, 6))
KIND = TensorKind(torch.float32, (4, 6), 0)

CALLS: dict[str, Callable[[], Any]] = {
    "shards of one rank differ": lambda: shard_columns(
        [part(0, 2), part(0, 4), replace(part(0, 2, "v"), dtype=torch.int8, data=None), part(1, 2, "v")], 3
    ),
    "ranks differ": lambda: join_columns(
        [
            shard_columns([part(0, 2), part(0, 1, "v")], 0),
            shard_columns([TALL, part(0, 1, "v")], 1),
            shard_columns([TALL], 2),
        ]
    ),
    "tensor and object": lambda: raise_problems(
        sharding_problems([shard_columns([part(0, 1)])], [object_columns([cell(0, key="w")], 1)])
    ),
    "a place without a main replica": lambda: access(part(0, 4), part(1, 4, replica_id=1), part(3, 4)),
    "a place held twice": lambda: access(part(0, 2), part(0, 2), part(0, 2), part(0, 2), part(0, 2), part(1, 2)),
    "a flat place": lambda: access(flat(0, 5), flat(3, 8), flat(9, 24)),
    "nobody": lambda: access(part(0, 2, replica_id=1), part(1, 2, replica_id=1)),
    "beyond": lambda: access(
        replace(part(0, 2), global_shape=(3, 6), axis_fragmentations=None),
        replace(part(1, 2), global_shape=(3, 6), axis_fragmentations=None, allow_shape_mismatch=True),
    ),
    "objects: missing and doubled": lambda: objects(
        cell(0), cell(0), cell(0, 0, of=(1, -1), key="open"), cell(0, 2, of=(1, -1), key="open")
    ),
    "unshard: not covered": lambda: unshard(ranks(part(0, 4), part(1, 4), part(1, 4))),
    "unshard: no data": lambda: unshard(ranks(part(0, 2).without_data(), part(1, 2).without_data())),
    "unshard: on meta": lambda: unshard(ranks(replace(part(0, 1), data=torch.empty(4, 6, device="meta")))),
    "unshard: holes": lambda: unshard([{"a": [part(0, 1), HOLE]}, {"a": [part(0, 1, replica_id=1), HOLE]}]),
    "trees: one tree": lambda: trees_by_rank({"w": part(0, 1)}),
    "trees: a set": lambda: trees_by_rank({1, 2}),  # type: ignore[arg-type]
    "trees: not ranks": lambda: trees_by_rank({-1: {}, True: {}, 1.5: {}}),
    "objects: not all there": lambda: held_arrays([cell(0), cell(2, of=(4,)), cell(3, of=(4,))])["rng"].whole(
        "rng", (4,)
    ),
    "objects: two mains": lambda: held_arrays([cell(0), cell(0), cell(1), cell(0)]),
    "objects: other kinds": lambda: concatenate_objects(array([1], [2], (3,), "4"), (1,)),
    "objects: other rows": lambda: redistribute_objects(
        array(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int8)), (1,)
    ),
    "objects: no join": lambda: concatenate_objects(array({1}, {2}), (1,)),
    "objects: no axis": lambda: redistribute_objects(array(np.array(1.0), np.array(2.0)), (1,)),
    "objects: values differ": lambda: replicate_objects(
        array({"a": 1, "b": 2, "long": "x" * 100}, {"a": 1, "b": 3, "c": torch.ones(2), "long": "y"}, 5), (4,)
    ),
    "objects: values of equal text differ": lambda: replicate_objects(array([{1}], [{2}]), (4,)),
    "objects: no such cell": lambda: replicate_cell((2,))(array(1, 2), (1,)),
    "objects: not a function": lambda: fold_objects(3),  # type: ignore[arg-type]
    "objects: cannot be copied": lambda: fold_objects(operator.add)(array(Uncopied(), 2), (1,)),
    "objects: no values by cell": lambda: reshard_objects(
        [cell(0), cell(1)], [cell(0, of=(1,))], {"rng": lambda old, shape: 5}
    ),
    "objects: wrong number of values": lambda: reshard_objects(
        [cell(0), cell(1)], [cell(0, of=(3,))], {"rng": lambda old, shape: [5]}
    ),
    "objects: what a rule raises": lambda: reshard_objects(
        [cell(0), cell(1, value="a")], [cell(0, of=(3,))], {"rng": replicate_objects}
    ),
    "objects: absent": lambda: reshard_objects([cell(0)], [cell(0, key="b"), cell(0, key="a"), cell(0)]),
    "objects: not a dict of rules": lambda: reshard_objects([cell(0)], [], replicate_objects),  # type: ignore[arg-type]
    "objects: not rules": lambda: reshard_objects([cell(0)], [], {"rng": 3, "*": replicate_objects}),  # type: ignore[dict-item]
    "objects: rules that name nothing": lambda: reshard_objects(
        [cell(0)], [cell(0, key="a")], {"rng": replicate_objects, "b": replicate_objects}
    ),
    "objects: no rule": lambda: reshard_objects(
        [cell(0), cell(1), cell(0, of=(4,))], [cell(0, of=(3,)), cell(1, of=(3,))]
    ),
    "objects: unclear": lambda: reshard_objects(
        [cell(0), cell(1), cell(0, of=(4,))], [cell(0, of=(3,))], {"rng": replicate_objects}
    ),
    "objects: to an open shape": lambda: reshard_objects(
        [cell(0), cell(1)], [cell(0, of=(-1,))], {"rng": replicate_objects}
    ),
    "objects: nobody has it": lambda: reshard_objects([cell(0), cell(1, replica_id=1)], [cell(0), cell(1)]),
    "fields: not a dict": lambda: rules_by_field([replicate_objects]),  # type: ignore[arg-type]
    "fields: not rules": lambda: rules_by_field({"a": 1, "b": replicate_objects}),  # type: ignore[dict-item]
    "fields: not dicts": lambda: fields({"a": 1}, 5, a=replicate_objects),
    "fields: other fields": lambda: fields({"a": 1}, {"b": 1}, a=replicate_objects),
    "fields: rules do not fit": lambda: fields(
        {"a": 1, "b": 1}, {"a": 1, "b": 1}, a=replicate_objects, c=replicate_objects
    ),
    "fields: in a field": lambda: fields({"a": 1}, {"a": 2}, a=replicate_objects),
    "mesh: ranks do not fit": lambda: MESH.on_ranks([0, 1, 2]),
    "mesh: a negative rank": lambda: MESH.on_ranks([-1, 1, 2, 3]),
    "mesh: not a rank": lambda: MESH.on_ranks([0, 1.5, 2, 3]),  # type: ignore[list-item]
    "mesh: no number": lambda: MESH.coordinates(None),  # type: ignore[arg-type]
    "mesh: no such axis": lambda: MESH.rank_at(dp=1, tp=1, pp=0),
    "mesh: an axis too few": lambda: MESH.rank_at(dp=1),
    "mesh: a place that is no number": lambda: MESH.rank_at(dp=1, tp="1"),  # type: ignore[arg-type]
    "split: not a name": lambda: AxisSplit(2),  # type: ignore[arg-type]
    "split: not a number": lambda: AxisSplit("tp", 1.5),  # type: ignore[arg-type]
    "spec: an axis twice": lambda: PartitionSpec("tp", ("dp", "tp"), at={"dp": 1}),
    "spec: a mix": lambda: PartitionSpec(("tp", AxisSplit("dp"))),  # type: ignore[arg-type]
    "spec: at a number": lambda: PartitionSpec(at={3: 1}),  # type: ignore[dict-item]
    "spec: at no number": lambda: PartitionSpec(at={"pp": "1"}),  # type: ignore[dict-item]
    "spec: not a kind": lambda: check_spec("w", FULL, MESH, ROWS),  # type: ignore[arg-type]
    "spec: prepended": lambda: check_spec("w", TensorKind(torch.float32, (2, 4, 6), 1), MESH, ROWS),
    "spec: not one": lambda: check_spec("w", KIND, MESH, "tp"),  # type: ignore[arg-type]
    "spec: too long": lambda: check_spec("w", KIND, MESH, PartitionSpec(None, None, "tp")),
    "spec: unknown": lambda: check_spec("w", KIND, MESH, PartitionSpec("pp", at={"dp": 2, "ep": 0})),
    "spec: a negative place": lambda: check_spec("w", KIND, MESH, PartitionSpec(at={"dp": -1})),
    "part: unknown": lambda: mesh_shard((4, 6), MESH, PartitionSpec("pp"), 0),
    "part: beyond 64 bits": lambda: mesh_shard((4, 2**63), MESH, ROWS, 0),
    "leaf: a place beyond 64 bits": lambda: ShardedObject("rng", 0, (2**64,), (0,)),
    "leaf: a replica beyond 64 bits": lambda: ShardedObject("rng", 0, (1,), (0,), replica_id=-(2**64)),
    "part: not a shape": lambda: mesh_shard((4, "6"), MESH, ROWS, 0),  # type: ignore[arg-type]
    "specs: not a default": lambda: specs_by_pattern({}, default="tp"),  # type: ignore[arg-type]
    "specs: not specs": lambda: specs_by_pattern({"**": "tp"}),  # type: ignore[dict-item]
    "specs: no pattern": lambda: specs_by_pattern({"a.*": ROWS, "b": ROWS})("c", FULL),
    "specs: what a function gives": lambda: shard({"a": [FULL]}, MESH, lambda key, leaf: "tp"),
    "specs: beyond": lambda: shard({"a": [FULL], "b": 3}, MESH, {"a": [ROWS, ROWS], "b": {"c": ROWS}, "d": ROWS}),
    "columns: not kinds": lambda: mesh_columns([KIND], MESH, {}),  # type: ignore[arg-type]
    "columns: not specs": lambda: mesh_columns({"w": KIND}, MESH, ROWS),  # type: ignore[arg-type]
    "columns: without a spec": lambda: mesh_columns({"w": KIND, "v": KIND, "u": KIND}, MESH, {"v": ROWS}),
    "columns: one key for two tensors": lambda: placed_columns(
        [
            Placement("w", KIND, ROWS),
            Placement("v", KIND, ROWS),
            Placement("w", TensorKind(torch.int8, (4, 6), 0), ROWS),
        ],
        MESH,
    ),
    "shard: parts": lambda: shard([part(0, 2), cell(0), flat(0, 24), cell(0, of=(1,))], MESH, ROWS),
    "shard: sparse": lambda: shard([FULL.to_sparse()], MESH, ROWS),
    "shard: different shapes": lambda: layout_of({"a": FULL, "b": FULL[:2]}, MESH, ROWS, key=lambda path: "w"),
    "parts: not the own part": lambda: rank_leaf("w", FULL[:3], torch.float32, BLOCKS),  # type: ignore[arg-type]
    "parts: flat": lambda: rank_leaf("w", FULL, torch.float32, BLOCKS).build_fn("w", FULL, 0, slice(0, 2)),  # type: ignore[arg-type,union-attr]
}


SAID = read_messages(Path(__file__).with_name("messages.txt"))


@pytest.mark.parametrize("name", CALLS)
def test_errors_say_what_is_wrong_and_what_to_do(name: str) -> None:
    assert said(CALLS[name]) == SAID[name]


def test_every_message_has_its_call() -> None:
    assert list(CALLS) == list(SAID)
