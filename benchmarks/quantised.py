"""FP8 by blocks to bfloat16, beside a plain copy of the same reads and writes: ``python -m benchmarks.quantised``."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

import shardtree as st
from shardtree.quantised import FORMS, recode

from ._measuring import Action, Bar, Settings, peak, print_bars, run

MIB = 1024 * 1024
WINDOW = 16 * MIB
FORM = FORMS["fp8_blocks"]
FAST = {"verify": False, "save_options": st.SaveOptions(durable=False)}


def bars(settings: Settings) -> list[Bar]:
    """Return the bars of seconds beside a copy, and of memory."""
    size, rounds = (4 * MIB, 1) if settings.quick else (10**9, 5)
    torch.set_num_threads(1)  # as torchrun sets it
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-quantised-") as where:
        folder = Path(where)
        source = _folder(folder, size)
        jobs = (partial(_converted, source, folder), partial(_copied, source, folder))
        jobs[0](), jobs[1]()
        pairs = [(jobs[0](), jobs[1]()) for _ in range(rounds)]
        ours, copy = (median(column) for column in zip(*pairs, strict=True))
        ratio = median(one / two for one, two in pairs)
        memory = peak(partial(_begun, source, folder), folder).own / MIB
        name = f"FP8 by blocks to bfloat16, {size / 1e9:.2g} GB"
        found = [
            Bar(name, "a copy by hand", ours, copy, ratio, 1.5),
            Bar(f"{name}: memory", "", memory, None, memory, 256.0, "MiB"),
        ]
    print_bars("Quantised weights", found, settings.console)
    return found


def _folder(folder: Path, size: int) -> Path:
    """Return a folder as Hugging Face has it, of so many bytes, in files of an eighth."""
    source, rows = folder / "fp8", max(128, size // 8 // 4 // 4096 // 128 * 128)
    source.mkdir()
    weight_map = {}
    for number in range(8):
        tensors = {}
        for each in range(4):
            key = f"layers.{number}.{each}.weight"
            values = torch.randint(0, 127, (rows, 4096), dtype=torch.uint8).view(torch.float8_e4m3fn)
            scales = torch.rand(rows // 128, 32) + 0.5
            tensors |= dict(zip(FORM.keys(key), (values, scales), strict=True))
        name = f"model-{number + 1:05}-of-00008.safetensors"
        save_file(tensors, source / name)
        weight_map |= dict.fromkeys(tensors, name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return source


def _converted(source: Path, folder: Path) -> float:
    target = folder / "bfloat16"
    begin = time.perf_counter()
    st.convert(source, target, backend="huggingface", transform=recode(torch.bfloat16), **FAST)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds


def _begun(source: Path, folder: Path, rank: int, ranks: int) -> Action:
    def convert() -> int:
        _ = _converted(source, folder)
        return 0

    return convert


def _copied(source: Path, folder: Path) -> float:
    """Return the seconds that it takes to read all of it and to write each byte twice."""
    target, window = folder / "copy", memoryview(bytearray(WINDOW))
    begin = time.perf_counter()
    with target.open("wb", buffering=0) as out:
        for path in sorted(source.glob("*.safetensors")):
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(window):
                    out.write(window[:count])
                    out.write(window[:count])
    seconds = time.perf_counter() - begin
    target.unlink()
    return seconds


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns 1 where a bar is missed and ``--strict`` is given."""
    return run(bars, arguments, "benchmarks.quantised", __doc__)


if __name__ == "__main__":
    sys.exit(main())
