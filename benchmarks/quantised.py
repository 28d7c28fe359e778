"""FP8 by blocks to bfloat16 beside a plain copy: ``python -m benchmarks.quantised --size 10GB --rounds 3``.

The source is a folder as Hugging Face has it: the layers of an 8B Llama, with random codes and scales, in files of a
GB. A conversion of it, and a copy that reads all of it and writes each byte twice, take turns. Both sync what they
write, and begin with nothing of the source in the page cache; in ``--dir /dev/shm`` all is in memory. Three times the
size has to be free there. On a busy machine, seconds of the processor say more.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from safetensors.torch import save_file

import shardtree as st
from shardtree.quantised import FORMS, recode

from ._measuring import Bar, Settings, finish, parser, print_bars, resident, resident_peak, settings_of
from .roundtrip import _bytes

MIB = 1024 * 1024
WINDOW = 16 * MIB
FILE = 10**9
FORM = FORMS["fp8_blocks"]
MATRICES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
NORMS = ("input_layernorm", "post_attention_layernorm")


def bars(settings: Settings) -> list[Bar]:
    """Return the bars of 1 GB."""
    small = ["--size", "4MB", "--rounds", "1"] if settings.quick else []
    return _all_bars(_parser().parse_args(small), settings)


def _all_bars(options: argparse.Namespace, settings: Settings) -> list[Bar]:
    """Return the bars of seconds beside a copy, and of memory."""
    torch.set_num_threads(1)  # as torchrun sets it
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-quantised-") as where:
        source = Path(where) / "fp8"
        size = _write_source(source, options.size, 32 if settings.quick else 1)
        found = _measured(source, size, options.rounds, settings.console)
    print_bars("Quantised weights", found, settings.console)
    return found


def _measured(source: Path, size: int, rounds: int, console: Console) -> list[Bar]:
    name, taken = f"FP8 by blocks to bfloat16, {size / 1e9:.2g} GB", list[tuple[_Taken, _Taken]]()
    for number in range(rounds):
        ours, copy = _taken(_convert, source), _taken(_copy, source)
        taken.append((ours, copy))
        console.print(f"round {number + 1}: {ours}; a copy {copy}")
    bars = []
    for what, most in (("seconds", 1.5), ("processor", None)):
        pairs = [(getattr(ours, what), getattr(copy, what)) for ours, copy in taken]
        (mine, other), ratio = map(median, zip(*pairs, strict=True)), median(one / two for one, two in pairs)
        bars.append(Bar(name if most else f"{name}: processor", "a copy by hand", mine, other, ratio, most))
    memory = max(ours.memory for ours, _ in taken)
    return [*bars, Bar(f"{name}: memory", "", memory, None, memory, 256.0, "MiB")]


def _write_source(source: Path, size: int, divisor: int) -> int:
    """Write a model of about so many bytes, and return how many; its sides are a model's, divided by a number."""
    source.mkdir()
    shapes = {name: (rows // divisor, columns // divisor) for name, (rows, columns) in MATRICES.items()}
    # All layers have the same codes, without NaN: drawing others would take longer than the conversion.
    drawn = {name: torch.randint(0, 254, shape, dtype=torch.uint8) for name, shape in shapes.items()}
    codes = {name: (each + (each >= 127)).view(torch.float8_e4m3fn) for name, each in drawn.items()}
    layer = sum(each.numel() for each in codes.values())
    layers, a_file = max(1, size // layer), max(1, FILE // layer)
    files = -(-layers // a_file)
    weight_map, total = dict[str, str](), 0
    for number in range(files):
        tensors = dict[str, torch.Tensor]()
        for each in range(number * a_file, min(layers, (number + 1) * a_file)):
            for name, values in codes.items():
                rows, columns = values.shape
                scales = (torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5) / 5000
                keys = FORM.keys(f"model.layers.{each}.{name}.weight")
                tensors |= dict(zip(keys, (values.clone(), scales), strict=True))
            norm = torch.ones(4096 // divisor, dtype=torch.bfloat16)
            tensors |= {f"model.layers.{each}.{name}.weight": norm.clone() for name in NORMS}
        path = source / f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file(tensors, path)
        weight_map |= dict.fromkeys(tensors, path.name)
        total += path.stat().st_size
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a job took: seconds by the clock and of the processor, and MiB beside what was there before."""

    seconds: float
    processor: float
    memory: float

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s, {self.processor:.3g} s of the processor, {self.memory:.0f} MiB"


def _taken(job: Callable[[Path, Path], None], source: Path) -> _Taken:
    """Return what a job takes that begins with nothing to be written, and reads what isn't in the page cache."""
    target = source.with_name("target")
    os.sync()
    for path in source.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before can't be taken again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before, clock, processor = resident(), time.perf_counter(), time.process_time()
    job(source, target)
    taken = _Taken(time.perf_counter() - clock, time.process_time() - processor, (resident_peak() - before) / MIB)
    shutil.rmtree(target)
    return taken


def _convert(source: Path, target: Path) -> None:
    st.convert(source, target, backend="huggingface", transform=recode(torch.bfloat16), verify=False)


def _copy(source: Path, target: Path) -> None:
    """Read all of it, and write each byte twice."""
    window = memoryview(bytearray(WINDOW))
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file, (target / path.name).open("wb", buffering=0) as out:
            while count := file.readinto(window):
                out.write(window[:count])
                out.write(window[:count])
            os.fsync(out.fileno())


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns 1 where a bar is missed and ``--strict`` is given."""
    options = _parser().parse_args(arguments)
    settings = settings_of(options)
    return finish(bars(settings) if options.quick else _all_bars(options, settings), options)


def _parser() -> argparse.ArgumentParser:
    asked = parser("benchmarks.quantised", __doc__)
    asked.add_argument("--size", type=_bytes, default=_bytes("1GB"), help="of the source, such as 10GB")
    asked.add_argument("--rounds", type=int, default=5, help="how often both are done")
    return asked


if __name__ == "__main__":
    sys.exit(main())
