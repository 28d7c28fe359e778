"""Peak memory of a ZeRO-3 checkpoint's way to a model's files: ``python -m benchmarks.zero3``.

A folder of the shape of a Llama of 8 billion parameters, on 8 ranks: 96 GB of masters and moments, as files with holes,
so that it takes no room. Zeros are read; what is written are a model's 16 GB in bfloat16, each a master rounded.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import shardtree as st
from shardtree.codec.archives._zip import WrittenRecord, descriptor, directory, local_header
from shardtree.codec.pickles import Global, Persistent, Reduced, write_pickle

from ._bars import Bar, Settings, print_bars, run
from ._peak import Action, peak

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


def make_folder(folder: Path, shapes: Shapes) -> None:
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


def convert(folder: Path, rank: int, ranks: int) -> Action:
    """Convert a tiny folder, and get ready for the other."""
    _convert(folder / "tiny", folder / "tiny-hf")

    def action() -> int:
        _convert(folder / "zero3", folder / "hf")
        return 0

    return action


def _convert(source: Path, destination: Path) -> None:
    left_out = ["optimizer.**", "common"]
    fast = st.SaveOptions(durable=False)
    st.convert(source, destination, backend="huggingface", leave_out=left_out, save_options=fast)


def bars(settings: Settings) -> list[Bar]:
    """Return the bar of the conversion."""
    shapes = QUICK if settings.quick else FULL
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-zero3-") as name:
        folder = Path(name)
        make_folder(folder / "tiny", TINY)
        make_folder(folder / "zero3", shapes)
        seen = peak(partial(convert, folder), folder)
        shutil.rmtree(folder / "hf")
    count = sum(prod(shape) for shape in shapes.values())
    note = f"{count / 1e9:.3g} billion parameters; {seen.mapped / MIB:.3g} with mapped pages; {seen.samples} looks"
    figure = seen.own / MIB
    found = [Bar("ZeRO-3 to a model's files", "", figure, None, figure, MOST, "MiB", note)]
    print_bars("Peak extra memory", found, settings.console)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark by its command."""
    return run(bars, arguments, "benchmarks.zero3", __doc__)


if __name__ == "__main__":
    sys.exit(main())
