"""Optimizer states of others on their way to a model's names: ``python -m benchmarks.optimizers``.

ZeRO-3 to a model's files: a folder of the shape of a Llama of 8 billion parameters, on 8 ranks: 96 GB of masters and
moments, as files with holes, so that it takes no room. Zeros are read; what is written are a model's 16 GB in bfloat16,
each a master rounded. What counts is the peak of memory.

A `dp_reshardable` optimizer becomes `fully_reshardable`, beside a copy: a folder as Megatron-Core 0.16.1 writes it, of
302 million parameters: weights by their names, masters and moments in buckets. What is measured is the conversion,
without reading the result back; a copy reads and checks nothing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

import shardtree as st
from shardtree.formats.archives._zip import WrittenRecord, descriptor, directory, local_header
from shardtree.formats.pickles import Global, Persistent, Reduced, write_pickle
from shardtree.interop.megatron_optimizer import model_space

from ._measuring import Action, Bar, Settings, peak, print_bars, run

MIB = 1024 * 1024
RANKS = 8
MOST = 1024.0

Shapes = dict[str, tuple[int, ...]]


def llama(layers: int, width: int, inner: int, vocabulary: int, keys: int) -> Shapes:
    """Return the shapes of a Llama's parameters, by Hugging Face's names."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.self_attn.{name}_proj.weight": (width, width) for name in ("q", "o")}
        shapes |= {f"{start}.self_attn.{name}_proj.weight": (keys, width) for name in ("k", "v")}
        shapes |= {f"{start}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"{start}.mlp.down_proj.weight"] = (width, inner)
        shapes |= {f"{start}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


FULL = llama(32, 4096, 14336, 128256, 1024)
QUICK = llama(2, 256, 512, 1000, 64)
TINY = llama(1, 8, 8, 16, 8)


class Storages:
    """The tensors of an archive of holes, numbered as they are named in its pickle."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def tensor(self, kind: str, item: int, *shape: int) -> Reduced:
        """Return a tensor of a storage of its own."""
        count = prod(shape)
        storage = Persistent(("storage", Global("torch", kind), str(len(self.nbytes)), "cpu", count))
        self.nbytes.append(count * item)
        hooks = Reduced(Global("collections", "OrderedDict"), ())
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return Reduced(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, strides, False, hooks))


def write_holes(path: Path, value: Any, storages: Storages) -> None:
    """Write an archive of torch.save whose storages are holes, without checksums."""
    records: list[WrittenRecord] = []
    pickled = write_pickle(value, protocol=2)
    with path.open("wb") as file:
        named = [("data.pkl", len(pickled)), *((f"data/{key}", size) for key, size in enumerate(storages.nbytes))]
        for name, nbytes in named:
            record = WrittenRecord(f"archive/{name}", 0, nbytes, file.tell())
            records.append(record)
            file.write(local_header(record))
            if name == "data.pkl":
                file.write(pickled)
            else:
                file.seek(nbytes, 1)
            file.write(descriptor(record))
        file.write(directory(records, file.tell()))


def make_zero3(folder: Path, shapes: Shapes) -> None:
    """Write the files of all ranks."""
    folder.mkdir()
    own = sum(-(-prod(shape) // RANKS) for shape in shapes.values())
    for rank in range(RANKS):
        storages = Storages()
        module = {name: storages.tensor("BFloat16Storage", 2, 0) for name in shapes}
        model = {"module": module, "param_shapes": [shapes], "dp_world_size": RANKS, "ds_version": "0.19.8"}
        write_holes(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model, storages)
        storages = Storages()
        moments = {name: storages.tensor("FloatStorage", 4, own) for name in ("exp_avg", "exp_avg_sq")}
        state = {0: moments | {"step": 3}}
        outer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
        masters = [storages.tensor("FloatStorage", 4, own)]
        inner = {"zero_stage": 3, "partition_count": RANKS, "optimizer_state_dict": outer, "fp32_flat_groups": masters}
        write_holes(
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": inner}, storages
        )


def convert_zero3(folder: Path, rank: int, ranks: int) -> Action:
    """Convert a tiny folder, and get ready for the other."""
    _zero3_to_model(folder / "tiny", folder / "tiny-hf")

    def action() -> int:
        _zero3_to_model(folder / "zero3", folder / "hf")
        return 0

    return action


def _zero3_to_model(source: Path, destination: Path) -> None:
    left_out = ["optimizer.**", "common"]
    fast = st.SaveOptions(durable=False)
    st.convert(source, destination, backend="huggingface", leave_out=left_out, save_options=fast)


def zero3_bars(settings: Settings) -> list[Bar]:
    """Return the bar of the conversion."""
    shapes = QUICK if settings.quick else FULL
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-zero3-") as name:
        folder = Path(name)
        make_zero3(folder / "tiny", TINY)
        make_zero3(folder / "zero3", shapes)
        seen = peak(partial(convert_zero3, folder), folder)
        shutil.rmtree(folder / "hf")
    count = sum(prod(shape) for shape in shapes.values())
    note = f"{count / 1e9:.3g} billion parameters; {seen.mapped / MIB:.3g} with mapped pages; {seen.samples} looks"
    figure = seen.own / MIB
    found = [Bar("ZeRO-3 to a model's files", "", figure, None, figure, MOST, "MiB", note)]
    print_bars("Peak extra memory", found, settings.console)
    return found


# A `dp_reshardable` optimizer.

FULL_BUCKETS, QUICK_BUCKETS = (32, 1024, 40_000_000), (2, 64, 40_000)
"""Layers, width, and elements after which a bucket ends, as by Megatron-Core's default."""

GROUP = "optimizer.distributed.dp_group_idx_0"


def make_buckets(folder: Path, layers: int, width: int, bucket: int) -> None:
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


def convert_buckets(folder: Path, rank: int, ranks: int) -> Action:
    """Convert a tiny folder, and get ready for the other."""
    _buckets_to_model(folder / "tiny", folder / "tiny-full")

    def action() -> int:
        _buckets_to_model(folder / "buckets", folder / "full")
        return 0

    return action


def _buckets_to_model(source: Path, destination: Path) -> None:
    fast = st.SaveOptions(durable=False)
    how = model_space(st.open_checkpoint(source))
    st.convert(source, destination, backend="torch_dist", verify=False, save_options=fast, **how)


def bucket_bars(settings: Settings) -> list[Bar]:
    """Return the bars of memory and of time."""
    shape = QUICK_BUCKETS if settings.quick else FULL_BUCKETS
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-buckets-") as name:
        folder = Path(name)
        make_buckets(folder / "tiny", 1, 8, 100)
        make_buckets(folder / "buckets", *shape)
        size = sum(file.stat().st_size for file in (folder / "buckets").iterdir())
        seen = peak(partial(convert_buckets, folder), folder)
        shutil.rmtree(folder / "full")
        begin = time.perf_counter()
        _buckets_to_model(folder / "buckets", folder / "full")
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


def bars(settings: Settings) -> list[Bar]:
    """Return the bars of both ways."""
    return [*zero3_bars(settings), *bucket_bars(settings)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark by its command."""
    return run(bars, arguments, "benchmarks.optimizers", __doc__)


if __name__ == "__main__":
    sys.exit(main())
