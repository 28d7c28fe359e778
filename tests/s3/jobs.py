"""What processes do to a bucket while requests fail or they are killed: run by name, in processes of their own."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch

import shardtree as st
from shardtree.core import limits
from shardtree.stores import object_storage

ROOT = "s3://bucket/runs"
ROWS = 300
PART_BYTES = 16 * 1024  # so that files of a few KiB go in parts


def place(path: str = "") -> Any:
    return object_storage(f"{ROOT}/{path}" if path else ROOT, retry_config={"max_retries": 0})


def tree(value: float) -> dict[str, Any]:
    whole = torch.full((ROWS, 32), float(value))
    return {"w": st.ShardedTensor.from_rank_offsets("w", whole), "step": int(value)}


def value_of(storage: Any) -> int | None:
    """Return what a whole checkpoint was made with, None if there is no checkpoint."""
    if not st.is_checkpoint(storage):
        return None
    target = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(ROWS, 32)), "step": 0}
    found = st.load(target, storage)
    # Files of tensors alone have no step.
    (value,) = {*found["w"].flatten().tolist(), float(found.get("step", found["w"][0, 0]))}
    return int(value)


def save(value: int) -> None:
    st.save(tree(value), place(), overwrite=True)


def save_with_momentum(value: int, backend: tuple[str, int], biases: int) -> None:
    """Save two tensors in files of their own; with many biases, the index goes in parts."""
    small = {f"b{number:03}": torch.zeros(1) for number in range(biases)}

    def save_rank(world: st.World) -> None:
        momentum = st.ShardedTensor.from_rank_offsets("momentum.w", torch.full((ROWS, 32), float(value)))
        others = {key: st.ShardedTensor.from_rank_offsets(key, each) for key, each in small.items()}
        own = {"momentum": momentum} if world.rank else {**tree(value), **others}
        st.save({"step": int(value), **own}, place(), backend, world=world)

    st.simulate(2, save_rank)


def momentum_of(storage: Any) -> int | None:
    """Return what the momentum of `save_with_momentum` was made with, None if there is none."""
    if "momentum.w" not in st.load_tensors_metadata(storage):
        return None
    target = {"momentum": st.ShardedTensor.from_rank_offsets("momentum.w", torch.zeros(ROWS, 32))}
    (value,) = {*st.load(target, storage)["momentum"].flatten().tolist()}
    return int(value)


def remove_tensors(_: int) -> None:
    st.remove_sharded_tensors(place(), "momentum.")


def remove(_: int) -> None:
    series = st.CheckpointSeries(place("series"))
    series.remove(series.plan_removal(st.retention.keep_last(1)))


def save_step(value: int) -> None:
    st.CheckpointSeries(place("series")).save(tree(value), value)


def convert(_: int) -> None:
    st.convert(place(), place("there"), backend="safetensors")


def save_dist(value: int) -> None:
    """Save in a format whose files have fixed names: what a killed save uploads is in no folder of its own."""
    st.save(tree(value), place(), ("torch_dist", 1))


def convert_hf(_: int) -> None:
    st.convert(place(), place("there"), backend="huggingface", leave_out=["common"])


def remove_first(value: int) -> None:
    """A planted fault: the old save's files go before the new one counts."""
    storage = place()
    for name in storage.entries():
        if name.startswith("save-"):
            storage.remove(name)
    save(value)


JOBS = {
    "save": save,
    "save_dist": save_dist,
    "remove": remove,
    "remove_tensors": remove_tensors,
    "remove_zarr": remove_tensors,
    "save_step": save_step,
    "convert": convert,
    "convert_hf": convert_hf,
    "remove_first": remove_first,
}


def settings() -> dict[str, str]:
    """Return what a new process needs to find the bucket.

    It is forked from a server that keeps the environment of its start, which another test may have made.
    """
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def run(job: str, value: int, settings: Mapping[str, str]) -> None:
    """Run a job in a new process; it exits with 1 where the job fails in a way that it may."""
    os.environ.update(settings)
    torch.set_num_threads(1)
    limits.UPLOAD_PART_BYTES = PART_BYTES
    try:
        JOBS[job](value)
    except st.errors.CheckpointingException:
        sys.exit(1)
    except BaseException:
        traceback.print_exc()
        sys.exit(2)
