"""Wrong input to plans of buffers: each error names all offenders, what was found and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardtree.buffers import buffer_slices, flat_shards, flat_targets, plan_buffers, slice_views
from shardtree.errors import CheckpointingException, KeyMismatch, MetadataError, ShapeError
from shardtree.mapping import ShardedTensor, ShardedTensorFactory
from shardtree.testing import glu

SHAPES = {"w": (2, 3), "b": (3,), "norm": (4,)}
PLAN = plan_buffers(SHAPES, data_parallel=2, bucket_size=9)  # buckets of 10 and 4 elements
HELD = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(shape)) for name, shape in SHAPES.items()}
FLAT = ShardedTensor.from_rank_offsets_flat("f", torch.zeros(2), (3,), flattened_range=slice(0, 2))
OWN = [torch.zeros(5), torch.zeros(2)]
ZEROS = {"w": torch.zeros(5), "norm": torch.zeros(2)}

Case = tuple[Callable[[], Any], type[CheckpointingException], str]

PLANS: list[Case] = [
    (lambda: plan_buffers(SHAPES, data_parallel=True), MetadataError, "found bool"),
    (lambda: plan_buffers(SHAPES, data_parallel=2, align=0), MetadataError, "align .*\n  found 0.*\n  Pass 1 for"),
    (lambda: plan_buffers(SHAPES, data_parallel=2, bucket_align=-1), MetadataError, "bucket_align doesn't fit"),
    (lambda: plan_buffers(SHAPES, data_parallel=2, order="wb"), MetadataError, "order doesn't fit\n  found 'wb'"),
    (lambda: plan_buffers(SHAPES, data_parallel=2, order=3), MetadataError, "order doesn't fit\n  found 3"),
    (
        lambda: plan_buffers(SHAPES, data_parallel=2, order=["w", "w"]),
        KeyMismatch,
        "(?s)'b' isn't there.*'norm' isn't there.*'w' is there 2 times.*reversed",
    ),
    (lambda: plan_buffers(SHAPES, data_parallel=2, order=["x", 3, []]), KeyMismatch, r"(?s)order has.*'x'.*3.*\[\]"),
    (lambda: plan_buffers(SHAPES, data_parallel=2, alone=["x"]), KeyMismatch, "alone has names of no parameter\n  'x'"),
    (lambda: plan_buffers(SHAPES, data_parallel=2, alone=None), MetadataError, "alone doesn't fit\n  found None"),
    (
        lambda: plan_buffers({"w": None, "f": FLAT, "n": (2, -1), "x": (1.5,), "": (2,)}, data_parallel=2),
        MetadataError,
        r"(?s)'w': NoneType.*'f': a flat range already.*'n': shape \(2, -1\).*'x': .*found float.*'': not a name",
    ),
    (
        lambda: plan_buffers({"g": ShardedTensorFactory("g", None, list, list)}, data_parallel=2),
        MetadataError,
        "(?s)'g': ShardedTensorFactory without data.*of a factory without data its tensor's shape",
    ),
    (
        lambda: plan_buffers({"w": torch.zeros(2), "b": torch.zeros(2).half(), "s": (2,)}, data_parallel=2),
        MetadataError,
        r"(?s)several dtypes.*torch.float32: 'w', 1 in all.*torch.float16: 'b'.*Plan a buffer for each dtype",
    ),
]

SLICES: list[Case] = [
    (lambda: PLAN.ranges(-1), MetadataError, "found -1"),
    (lambda: PLAN.ranges("0"), MetadataError, "found str"),  # type: ignore[arg-type]
    (lambda: slice_views(SHAPES, 0, OWN), MetadataError, "slice_views: not a plan\n  found dict"),  # type: ignore[arg-type]
    (lambda: slice_views(PLAN, 7, OWN), MetadataError, "found 7, expected a data-parallel rank"),
    (
        lambda: slice_views(PLAN, 0, OWN[:1]),
        ShapeError,
        "rank 0 of 2: .*\n  found 1 tensor, expected a list of 2",
    ),
    (lambda: slice_views(PLAN, 0, {0: OWN[0]}), ShapeError, "found dict"),  # type: ignore[arg-type]
    (
        lambda: slice_views(PLAN, 1, [torch.zeros(10), torch.zeros(1, 2)]),
        ShapeError,
        r"(?s)bucket 0: \(10,\) torch.float32, not \(5,\).*bucket 1: \(1, 2\) torch.float32, not \(2,\).*padding",
    ),
    (lambda: slice_views(PLAN, 1, [None, "x"]), ShapeError, r"(?s)bucket 0: NoneType, not \(5,\).*bucket 1: str"),
    (
        lambda: slice_views(PLAN, 1, [OWN[0], OWN[1].half()]),
        ShapeError,
        "(?s)several dtypes.*bucket 0: torch.float32.*bucket 1: torch.float16.*one kind of state",
    ),
    (lambda: buffer_slices(None, 0, ZEROS), MetadataError, "buffer_slices: not a plan"),  # type: ignore[arg-type]
    (lambda: buffer_slices(PLAN, 2, ZEROS), MetadataError, "found 2, expected a data-parallel rank"),
    (lambda: buffer_slices(PLAN, 0, list(ZEROS)), ShapeError, "not tensors by name\n  found list"),  # type: ignore[arg-type]
    (
        lambda: buffer_slices(PLAN, 0, {"w": ZEROS["w"], "b": torch.zeros(3), "step": 3}),
        KeyMismatch,
        "(?s)rank 0: other names.*'norm' is missing.*'b': the rank has nothing of it.*'step': the rank has nothing",
    ),
    (
        lambda: buffer_slices(PLAN, 0, {"w": torch.zeros(6), "norm": torch.zeros(2).half()}),
        ShapeError,
        r"(?s)'w': \(6,\) torch.float32, not \(5,\) torch.float32.*'norm': \(2,\) torch.float16, not.*dtype= where",
    ),
    (lambda: buffer_slices(PLAN, 0, {**ZEROS, "w": None}), ShapeError, r"'w': NoneType, not \(5,\)"),
    (lambda: buffer_slices(PLAN, 0, ZEROS, dtype="float32"), MetadataError, "buffer_slices: not a dtype\n  found str"),  # type: ignore[arg-type]
]

SHARDS: list[Case] = [
    (lambda: flat_shards("plan", 0, OWN, HELD), MetadataError, "flat_shards: not a plan\n  found str"),  # type: ignore[arg-type]
    (lambda: flat_targets("plan", 0, HELD), MetadataError, "flat_targets: not a plan\n  found str"),  # type: ignore[arg-type]
    (lambda: flat_shards(PLAN, 0, OWN, list(HELD)), ShapeError, "not parameters by name\n  found list"),  # type: ignore[arg-type]
    (
        lambda: flat_shards(PLAN, 0, OWN, {"w": HELD["b"], "b": torch.zeros(3), "norm": FLAT, "more": "ignored"}),
        ShapeError,
        r"(?s)'w': shape \(3,\), 3 elements; the plan has \(2, 3\), 6.*'b': Tensor, not a.*'norm': a flat range",
    ),
    (lambda: flat_shards(PLAN, 0, OWN, {**HELD, "w": glu("w", torch.zeros(2, 2))}), ShapeError, r"'w': shape \(2, 2\)"),
    (lambda: flat_shards(PLAN, 3, OWN, HELD), MetadataError, "found 3, expected a data-parallel rank"),
    (lambda: flat_targets(PLAN, 3, HELD), MetadataError, "found 3, expected a data-parallel rank"),
    (lambda: flat_shards(PLAN, 0, [], HELD), ShapeError, "found 0 tensors, expected a list of 2 tensors"),
    (lambda: flat_shards(PLAN, 0, OWN, HELD, prefix=3), MetadataError, "not a prefix\n  found int"),  # type: ignore[arg-type]
    (lambda: flat_shards(PLAN, 0, OWN, HELD, replica_id=0), MetadataError, "(?s)replica_id.*found int.*a function"),  # type: ignore[arg-type]
    (lambda: flat_targets(PLAN, 0, HELD, dtype="float32"), MetadataError, "not a dtype\n  found str"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "kind", "words"), [*PLANS, *SLICES, *SHARDS])
def test_wrong_input_is_told(call: Callable[[], Any], kind: type[CheckpointingException], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        call()
    assert type(caught.value) is kind
