"""A `dp_reshardable` optimizer becomes `fully_reshardable`, beside a copy: ``python -m benchmarks.dp_reshardable``.

A folder as Megatron-Core 0.16.1 writes it, of 302 million parameters: weights by their names, masters and moments in
buckets. What is measured is the conversion, without reading the result back; a copy reads and checks nothing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

import shardtree as st
from shardtree.interop.megatron_optimizer import model_space

from ._bars import Bar, Settings, print_bars, run
from ._peak import Action, peak

MIB = 1024 * 1024
MOST = 1024.0
FULL, QUICK = (32, 1024, 40_000_000), (2, 64, 40_000)
"""Layers, width, and elements after which a bucket ends, as by Megatron-Core's default."""

GROUP = "optimizer.distributed.dp_group_idx_0"


def make_folder(folder: Path, layers: int, width: int, bucket: int) -> None:
    """Write a checkpoint of one model-parallel rank."""
    shapes = {"linear_proj": (width, width), "linear_fc1": (4 * width, width), "linear_fc2": (width, 4 * width)}
    masters, shards, filled = [], list[st.ShardedTensor | st.ShardedObject](), list[list[torch.Tensor]]([[]])
    for layer in range(layers):
        for name, shape in shapes.items():
            master = torch.randn(shape)
            masters.append(master)
            key, place = f"decoder.layers.{name}.weight", (0, layer, layers)
            weight = master.bfloat16()
            shards.append(st.ShardedTensor.from_rank_offsets(key, weight, place, prepend_axis_num=1))
    for master in reversed(masters):
        if sum(one.numel() for one in filled[-1]) >= bucket:
            filled.append([])
        filled[-1].append(master.flatten())
    for number, parts in enumerate(filled):
        name = f"{GROUP}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{number}"
        for state in ("param", "exp_avg", "exp_avg_sq"):  # moments take no memory of their own here
            shards += _chunks(f"{name}.{state}", parts)
    groups = {"param_groups": [{"lr": 1e-3, "step": 3.0}]}
    shards.append(st.ShardedObject(f"{GROUP}.optimizer", groups, (1,), (0,)))
    tree = {"shards": shards, "optimizer": {"param_state_sharding_type": "dp_reshardable"}}
    fast = st.SaveOptions(durable=False, snapshot=False)
    st.save(tree, folder, sharded_strategy=("torch_dist", 1), common_strategy=("torch", 1), options=fast)


def _chunks(key: str, parts: Sequence[torch.Tensor]) -> Iterator[st.ShardedTensor]:
    length, begin = sum(part.numel() for part in parts), 0
    for part in parts:
        yield st.ShardedTensor(key, part, part.dtype, (part.numel(),), (length,), (begin,), None)
        begin += part.numel()


def convert(folder: Path, rank: int, ranks: int) -> Action:
    """Convert a tiny folder, and get ready for the other."""
    _convert(folder / "tiny", folder / "tiny-full")

    def action() -> int:
        _convert(folder / "buckets", folder / "full")
        return 0

    return action


def _convert(source: Path, destination: Path) -> None:
    fast = st.SaveOptions(durable=False)
    how = model_space(st.open_checkpoint(source))
    st.convert(source, destination, backend="torch_dist", verify=False, save_options=fast, **how)


def bars(settings: Settings) -> list[Bar]:
    """Return the bars of memory and of time."""
    shape = QUICK if settings.quick else FULL
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-buckets-") as name:
        folder = Path(name)
        make_folder(folder / "tiny", 1, 8, 100)
        make_folder(folder / "buckets", *shape)
        size = sum(file.stat().st_size for file in (folder / "buckets").iterdir())
        seen = peak(partial(convert, folder), folder)
        shutil.rmtree(folder / "full")
        begin = time.perf_counter()
        _convert(folder / "buckets", folder / "full")
        ours = time.perf_counter() - begin
        shutil.rmtree(folder / "full")
        begin = time.perf_counter()
        shutil.copytree(folder / "buckets", folder / "full")
        other = time.perf_counter() - begin
    note = f"{size / 1e9:.3g} GB; {seen.mapped / MIB:.3g} with mapped pages; {seen.samples} looks"
    figure = seen.own / MIB
    found = [
        Bar("Buckets to the model's names: peak", "", figure, None, figure, MOST, "MiB", note),
        Bar("Buckets to the model's names: time", "a copy", ours, other, ours / other, None),
    ]
    print_bars("A dp_reshardable optimizer", found, settings.console)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark by its command."""
    return run(bars, arguments, "benchmarks.dp_reshardable", __doc__)


if __name__ == "__main__":
    sys.exit(main())
