"""Instances of every public class of shardtree that can be stored, as tests/golden/at-73b114f holds them.

`python tests/golden/public_classes.py FOLDER`, run in a checkout of commit 73b114f, wrote that folder: the last one
before modules moved. It is frozen: what a new class needs is in the tests, not in these files.
"""

from __future__ import annotations

import pickle
import sys
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import shardtree as st
from shardtree.codec import encode_tree
from shardtree.codec.archives import encode_archive
from shardtree.lazy import stored
from shardtree.storage import LocalStorage, MemoryStorage


def column(*values: Any) -> np.ndarray[Any, Any]:
    """Return a column of 64-bit integers."""
    return np.array(values, np.int64)


KIND = st.layouts.TensorKind(torch.bfloat16, (4, 3), 0)
WEIGHT = st.ShardedTensor.from_rank_offsets("w", torch.arange(6.0).reshape(2, 3), (0, 1, 2), replica_id=(0, 1))
BARE = WEIGHT.without_data()
CELL = st.ShardedObject("rng", {"state": torch.arange(3), "seed": 7}, (2,), (1,))
COLUMNS = st.layouts.ShardColumns(
    ("w",), (KIND,), column(0), column([2, 0]), column([2, 3]), column(0), column(6), column(1), np.array([True])
)
TRANSFERS = st.plans.Transfers(
    *(column(number) for number in (1, 0, 0, 0, 1, 0)),
    *(column([2, 0]), column([2, 3]), column(24)),
    *(column(0), column([3, 1]), column(6), column([3, 1])),
)
HASHES = np.array([2**64 - 1, 5], np.uint64)
MISMATCH = st.plans.Mismatch("w", KIND, KIND, True)
COST = st.plans.ReadCost(24, 48, 2, 1)
STEP = st.retention.SavedStep(7, 12.5, {"loss": 0.5}, True, "step_00000007")
MARK = st.checkpoint.FileMark("a.safetensors", 10, 1.5)
FILES = st.checkpoint.StepFiles(7, "step_00000007", (MARK,), ("notes.txt",))
VALUES = st.checkpoint.ValueDifference("w", 1, 12, (0, 1), 0.5, 0.25, 0.25, 3)
PATHS = st.trees.Difference((("a",),), (("b", 0),), (("c", "d"),))
REGION = st.strategies.Region("w", (0, 0), (2, 3), (0, 6))
UNCHECKED = st.strategies.Unchecked("a.pt", "no checksums", 10, ((0, 10),))
BAR = st.pictures.Bar("rank 0", 0.5, "12 bytes", "h1", "half")
CELLS = st.pictures.Cell(0.0, 0.0, 1.0, 0.5, "h2", "w", ("0", "1"), "#")
PLANE = st.pictures.Plane("w", (CELLS,), 3, 4, 1.5, "columns", "rows", ("a",), ("b",), "caption", "short")
BLOCK = st.pictures.Block("w", 4)
MOMENT = st.pictures.Moment(1.5, "step 7", 0.5, "h3", "kept", True)
ENTRY = st.pictures.Entry("h4", "rank 0", "#")
PICTURE = st.pictures.Picture("w", ((PLANE,),), ("note",), (ENTRY,), True)
PLACE = st.buffers.BufferPlace("w", (4, 3), 0, 64)
PART = st.quantised.Part("_scale", (torch.float32,), abs, (0, 1))
ORIGIN = st.plans.Origin(0, 1, (slice(0, 2), slice(0, 3)), 24, 1, "w")
COVER = st.layouts.Problem(("a", 0), (0, 1), "held twice", (slice(0, 2),), slice(0, 6), "give replica ids")
RANGES = st.storage.ByteRanges(column(0), column(10), column(123))
TEXTS = {f"{name}_text": np.frombuffer(b"w", np.uint8) for name in ("key", "dtype", "object", "file")}
WORLD = st.world.current_world()
LOCAL = LocalStorage("/checkpoints")
READ_BY = {"w": st.traces.Kind((4, 3), torch.float16)}

INSTANCES: dict[str, Any] = {
    "shardtree.AsyncRequest": st.AsyncRequest(WORLD, len, len, (print,), outcome=st.strategies.Outcome({"a": 1})),
    "shardtree.CheckpointSeries": st.CheckpointSeries("/checkpoints", "step-{}"),
    "shardtree.LazyTensor": stored(len, (2,), torch.float16, name="w"),
    "shardtree.LoadOptions": st.LoadOptions(verify="all", types=(st.Mesh,), threads=3),
    "shardtree.LocalNonpersistentObject": st.LocalNonpersistentObject([1, "two"]),
    "shardtree.Mesh": st.Mesh(dp=2, tp=3),
    "shardtree.PartitionSpec": st.P("dp", None, ("tp", "ep"), at={"pp": 1}),
    "shardtree.ReshardPlan": st.ReshardPlan(COLUMNS, COLUMNS, TRANSFERS, {"w": ("old.w",)}),
    "shardtree.SaveOptions": st.SaveOptions(durable=False, threads=2),
    "shardtree.ShardedObject": CELL,
    "shardtree.ShardedTensor": WEIGHT,
    "shardtree.ShardedTensorFactory": st.ShardedTensorFactory("w", torch.ones(2), st.rename, st.merge, (0, 1)),
    "shardtree.StrategyAction": st.StrategyAction.VERIFY,
    "shardtree.StrictHandling": st.StrictHandling.RETURN_ALL,
    "shardtree.Trace": st.Trace(READ_BY, READ_BY, {}, {"head": "w"}),
    "shardtree.buffers.BufferPlace": PLACE,
    "shardtree.buffers.BufferPlan": st.buffers.BufferPlan(2, (PLACE,), ((0, 128),)),
    "shardtree.buffers.BufferRange": st.buffers.BufferRange("w", 1, 0, slice(0, 6), slice(6, 12)),
    "shardtree.checkpoint.CheckpointDifference": st.checkpoint.CheckpointDifference(
        ("a",), ("b",), (st.checkpoint.KindDifference("w", KIND, KIND),), (VALUES,), {"rng": PATHS}, PATHS, 12
    ),
    "shardtree.checkpoint.ConversionReport": st.checkpoint.ConversionReport(
        3, 1, 96, ("left",), (("w", 2),), 4, 2, None, {"w": 2**63}
    ),
    "shardtree.checkpoint.FileMark": MARK,
    "shardtree.checkpoint.KindDifference": st.checkpoint.KindDifference("w", KIND, KIND),
    "shardtree.checkpoint.OpenCheckpoint": st.checkpoint.OpenCheckpoint(
        st.strategies.Checkpoint(LOCAL, {}, WORLD), {"w": BARE}, None
    ),
    "shardtree.checkpoint.Removal": st.checkpoint.Removal((STEP,), {7: ("pinned",)}, (FILES,)),
    "shardtree.checkpoint.ReplicaDifference": st.checkpoint.ReplicaDifference("w", (0, 2), (1,), "[0:2]", VALUES),
    "shardtree.checkpoint.StepFiles": FILES,
    "shardtree.checkpoint.ValueDifference": VALUES,
    "shardtree.display.Drawing": st.display.Drawing(PICTURE),
    "shardtree.fingerprints.PartialFingerprint": st.fingerprints.PartialFingerprint(KIND, 12, 2**80),
    "shardtree.interop.dtensor.ModuleKeys": st.interop.dtensor.ModuleKeys(("a",), ("b",), ("c",)),
    "shardtree.layouts.AxisSplit": st.layouts.AxisSplit("tp", 2),
    "shardtree.layouts.Coverage": st.layouts.Coverage(
        ("w",), (KIND,), column(11), column(0), column(1), np.array([1.5]), (COVER,)
    ),
    "shardtree.layouts.ObjectColumns": st.layouts.ObjectColumns(
        ("rng",), ((2,),), column(0), column([1]), column(1), np.array([True])
    ),
    "shardtree.layouts.Problem": COVER,
    "shardtree.layouts.RankShard": st.layouts.RankShard(1, (((0, 2),), ((0, 3),)), (4, 3), 0, (2, 1)),
    "shardtree.layouts.ShardColumns": COLUMNS,
    "shardtree.layouts.StoredLayout": st.layouts.StoredLayout(COLUMNS, ("a.safetensors",)),
    "shardtree.layouts.TensorKind": KIND,
    "shardtree.lenses.AxisRuns": st.lenses.AxisRuns(column(3, 4), column(1, 0), column(0, 0), (4, 3)),
    "shardtree.lenses.StoredForm": st.lenses.StoredForm((BARE,), list),
    "shardtree.objects.ObjectArray": st.objects.ObjectArray("rng", (2,), ({"seed": 1}, {"seed": 2})),
    "shardtree.objects.ShapeChange": st.objects.ShapeChange("rng", ((2,), (4,)), (8,)),
    "shardtree.optim.OptimizerState": st.optim.OptimizerState(torch.ones(2), torch.float32, (2,), True),
    "shardtree.pictures.Bar": BAR,
    "shardtree.pictures.Bars": st.pictures.Bars("ranks", (BAR,), "caption"),
    "shardtree.pictures.Block": BLOCK,
    "shardtree.pictures.Cell": CELLS,
    "shardtree.pictures.Entry": ENTRY,
    "shardtree.pictures.Flow": st.pictures.Flow(
        "from", "to", (BLOCK,), (BLOCK,), (st.pictures.Stream(0, 1, 2, 0, 2, "h5", "moved", "a", "b"),), "caption"
    ),
    "shardtree.pictures.Line": st.pictures.Line("steps", (MOMENT,), "loss", "caption"),
    "shardtree.pictures.Moment": MOMENT,
    "shardtree.pictures.Picture": PICTURE,
    "shardtree.pictures.Plane": PLANE,
    "shardtree.pictures.Stream": st.pictures.Stream(0, 1, 2, 0, 2, "h5", "moved", "a", "b"),
    "shardtree.plans.Explanation": st.plans.Explanation(
        ("a",),
        (MISMATCH, st.plans.Gap("w", (0, 0), 3, 4)),
        (st.plans.RankReads(0, 1, 2, COST, 3, 4),),
        (st.plans.Undecided("w", "a pickle"),),
        (st.plans.Unexpected("v", "w", True, "model"),),
        ("left",),
        ("unfilled",),
        ("uncompared",),
        "exchange",
    ),
    "shardtree.plans.FailedCheck": st.plans.FailedCheck((0, 1), st.errors.ShapeError, "not a shape"),
    "shardtree.plans.Gap": st.plans.Gap("w", (0, 0), 3, 4),
    "shardtree.plans.Mismatch": MISMATCH,
    "shardtree.plans.Origin": ORIGIN,
    "shardtree.plans.Provenance": st.plans.Provenance(
        "w", {"w": KIND}, (ORIGIN,), {"w": (torch.float32, torch.bfloat16)}
    ),
    "shardtree.plans.RankReads": st.plans.RankReads(0, 1, 2, COST, 3, 4),
    "shardtree.plans.ReadCost": COST,
    "shardtree.plans.Refusal": st.plans.Refusal("w", "no such axis"),
    "shardtree.plans.Schedule": st.plans.Schedule(*(column(number) for number in range(7)), 1024),
    "shardtree.plans.Transfers": TRANSFERS,
    "shardtree.plans.Undecided": st.plans.Undecided("w", "a pickle"),
    "shardtree.plans.Unexpected": st.plans.Unexpected("v", "w", True, "model"),
    "shardtree.quantised.Form": st.quantised.Form("mine", (PART,), "_base", True, (2, 2)),
    "shardtree.quantised.Part": PART,
    "shardtree.retention.RetentionPolicy": st.retention.RetentionPolicy("all", frozenset),
    "shardtree.retention.SavedStep": STEP,
    "shardtree.storage.ByteRanges": RANGES,
    "shardtree.storage.BytesReader": st.storage.BytesReader(memoryview(b"abc"), "memory://a"),
    "shardtree.storage.Capabilities": st.storage.Capabilities(is_link=bool, latency=0.5, request_scale=3),
    "shardtree.storage.Entry": st.storage.Entry(10, 1.5),
    "shardtree.storage.LocalStorage": LOCAL,
    "shardtree.storage.MemoryStorage": MemoryStorage(),
    "shardtree.storage.ReadReport": st.storage.ReadReport(1, 2, 3, 4, ("a",), ("b",), ("c",), 5, 6, "exchange"),
    "shardtree.storage.SizedBuffers": st.storage.SizedBuffers(3, (memoryview(b"abc"),), True),
    "shardtree.storage.StoredFile": st.storage.StoredFile("a.safetensors", 10, HASHES, RANGES),
    "shardtree.strategies.Checkpoint": st.strategies.Checkpoint(LOCAL, {"backend": "zarr"}, WORLD),
    "shardtree.strategies.Damage": st.strategies.Damage("a.pt", "cut", 0, 10, ("w",), (REGION,)),
    "shardtree.strategies.FormatTraits": st.strategies.FormatTraits(("a.json",), True, "always", True, True),
    "shardtree.strategies.Index": st.strategies.Index(
        **{field.name: column(7) for field in fields(st.strategies.Index)}
        | TEXTS
        | {"block_hash": HASHES, "x_fingerprint": HASHES}
    ),
    "shardtree.strategies.Outcome": st.strategies.Outcome({"backend": "zarr"}),
    "shardtree.strategies.PendingSave": st.strategies.PendingSave(LOCAL, "save-1", WORLD, b"{}", layout=COLUMNS),
    "shardtree.strategies.RankFiles": st.strategies.RankFiles(
        ("a.safetensors",), (10,), (HASHES,), COLUMNS, column(0), column(64), (("rng", 0, 1, 2),), HASHES
    ),
    "shardtree.strategies.Region": REGION,
    "shardtree.strategies.Replaced": st.strategies.Replaced(LOCAL, LOCAL.sibling("a"), ()),
    "shardtree.strategies.StoredItem": st.strategies.StoredItem(BARE, 64, 24),
    "shardtree.strategies.Unchecked": UNCHECKED,
    "shardtree.strategies.VerifyReport": st.strategies.VerifyReport(10, (UNCHECKED,)),
    "shardtree.testing.GlobalState": st.testing.GlobalState({"w": torch.ones(2)}, {"rng": (1, 2)}, {"step": 7}),
    "shardtree.testing.OptimizerState": st.testing.OptimizerState(
        {"w": torch.ones(2)}, {"w": 1}, {"w": {"m": torch.ones(2)}}, {"w": {"n": torch.ones(1)}}, {"w": {"v": (1,)}}, ()
    ),
    "shardtree.testing.Piece": st.testing.Piece(1, (2, 0), (2, 3), (0, 6), (0, 1)),
    "shardtree.traces.Box": st.traces.Box((0, 1), (2, 3)),
    "shardtree.traces.Difference": st.traces.Difference("w", 3, "here", "there"),
    "shardtree.traces.Kind": st.traces.Kind((4, 3), torch.float16),
    "shardtree.traces.Move": st.traces.Move("w", 1, 2, ((3, 4, 5),), ("x",)),
    "shardtree.traces.Problem": st.traces.Problem("copied", "w", 3, "at 0"),
    "shardtree.trees.Difference": PATHS,
    "shardtree.trees.Record": st.trees.Record("train.Config", {"rate": 0.5}),
}
"""Public address of a class → an instance of it."""

NOT_PICKLED = {
    "shardtree.LazyTensor",
    "shardtree.storage.BytesReader",
    "shardtree.storage.MemoryStorage",
    "shardtree.storage.SizedBuffers",
}
"""Classes whose instances can't be pickled: they refuse it, or hold locks or views of memory."""

FORMATS = ("safetensors", "torch_dist", "dcp", "zarr")
"""Formats whose files name classes; Hugging Face's stores tensors and text."""

NOT_VALUES = {
    "shardtree.LazyTensor",
    "shardtree.LocalNonpersistentObject",
    "shardtree.ShardedObject",
    "shardtree.ShardedTensor",
    "shardtree.ShardedTensorFactory",
    "shardtree.optim.OptimizerState",
    "shardtree.strategies.StoredItem",
    "shardtree.testing.GlobalState",
    "shardtree.testing.OptimizerState",
}
"""Classes whose instances are shards or hold them or tensors: `save` refuses them in a value."""


DESCRIPTIONS = {
    "shardtree.LoadOptions",
    "shardtree.SaveOptions",
    "shardtree.checkpoint.CheckpointDifference",
    "shardtree.checkpoint.ConversionReport",
    "shardtree.checkpoint.KindDifference",
    "shardtree.checkpoint.OpenCheckpoint",
    "shardtree.checkpoint.ReplicaDifference",
    "shardtree.checkpoint.ValueDifference",
    "shardtree.plans.Explanation",
    "shardtree.plans.FailedCheck",
    "shardtree.plans.Gap",
    "shardtree.plans.Mismatch",
    "shardtree.plans.RankReads",
    "shardtree.plans.ReadCost",
    "shardtree.plans.Refusal",
    "shardtree.plans.Undecided",
    "shardtree.plans.Unexpected",
    "shardtree.storage.ReadReport",
    "shardtree.strategies.Checkpoint",
    "shardtree.strategies.Damage",
    "shardtree.strategies.FormatTraits",
    "shardtree.strategies.Outcome",
    "shardtree.strategies.PendingSave",
    "shardtree.strategies.Region",
    "shardtree.strategies.Replaced",
    "shardtree.strategies.Unchecked",
    "shardtree.strategies.VerifyReport",
}
"""Classes that describe a call: nobody's state, and they gain fields, so that checkpoints have none."""


def plain(backend: str) -> dict[str, Any]:
    """Return the instances that a format stores without a pickle, by their classes' public addresses."""

    def is_plain(value: Any) -> bool:
        try:
            encode_archive(value) if backend in ("torch_dist", "dcp") else encode_tree(value)
        except st.CheckpointingException:
            return False
        return True

    left_out = NOT_VALUES | DESCRIPTIONS
    return {name: value for name, value in INSTANCES.items() if name not in left_out and is_plain(value)}


FEW = ("shardtree.Mesh", "shardtree.StrategyAction", "shardtree.layouts.Problem", "shardtree.traces.Box")


def tree(backend: str) -> dict[str, Any]:
    """Return the tree whose checkpoint is in the folder of a format: two have all plain instances, the others a few.

    The others store values by the code of these two.
    """
    few = {name: INSTANCES[name] for name in FEW}
    common = plain(backend) if backend in ("safetensors", "torch_dist") else few
    shard = st.ShardedTensor.from_rank_offsets("w", torch.arange(3.0))
    return {"common": common, "object": st.ShardedObject("object", few, (1,), (0,)), "w": shard}


def pickles() -> dict[str, bytes]:
    """Return the pickles of all instances that can be pickled, by their classes' public addresses."""
    return {name: pickle.dumps(value, protocol=4) for name, value in INSTANCES.items() if name not in NOT_PICKLED}


def journal_record(backend: str) -> bytes:
    """Return what a conversion to a format records of a batch that it has written."""
    from shardtree.checkpoint.conversion import _journal  # where it was then: tests import the rest of this module

    records: list[bytes] = []
    source, encode = MemoryStorage(), encode_tree
    st.save({"w": tree(backend)["w"]}, source)
    with patch.object(_journal, "encode_tree", lambda value: records.append(encode(value)) or records[-1]):
        st.convert(source, MemoryStorage(), backend=backend)
    return records[0]


def write(folder: Path) -> None:
    """Write the folder: a checkpoint and a record of a conversion's journal for each format, and the pickles."""
    for backend in FORMATS:
        st.save(tree(backend), folder / backend, backend)
        (folder / f"{backend}.done").write_bytes(journal_record(backend))
    (folder / "pickles.z").write_bytes(zlib.compress(pickle.dumps(pickles()), 9))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
