"""What traces of loading code cost as models grow, and what loading through them saves: ``python -m benchmarks.trace``.

An engine's loader in the manner of vLLM's (rows, columns, gate and up in one, experts in one tensor) is traced for the
46,183 tensors of DeepSeek-V3, and for fewer, and for as many of a 256th of the bytes: `--plot FILE` stores both curves.
Then a folder of its form goes into eight ranks, each a process: through traces, and as is usual, where each rank reads
all of it, or maps it, and slices. Seconds are the processors', but those of eight ranks, which are the clock's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import safetensors
import safetensors.torch
import torch

import shardtree as st
from shardtree.world import one_process

from ._deepseek import SMALL, THIN, Config, Shapes, make_folder, nbytes_of, shapes_of
from ._measuring import Action, Bar, Curve, Panel, Settings, finish, parser, peak, plot, print_bars, settings_of
from ._moe_loader import traced_loader

RANKS = 8
LAYERS = (7, 15, 30, 61)
SERVED = Config(layers=5, experts=16, hidden=2048, intermediate=8192, moe_intermediate=1408, heads=32, vocab=32768)
MOST = {"trace": 20.0, "reads": 1.0, "inverse": 2.0, "memory": 512.0}
"""In seconds, but the memory of a process that traces, which is MiB."""
LOADER, MOST_OF_LOADER = "trace of a loader as engines write it", 0.3
TRACED, READ, MAPPED = "through traces", "reads all, slices", "maps, slices"

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
Parameters = dict[str, torch.Tensor]


# The engine's loader.

ROWS = ("embed_tokens", "head", "q_b_proj", "kv_b_proj", "lm_head")
COLUMNS = ("o_proj", "down_proj")


def engine(shapes: Shapes, rank: int, ranks: int, device: str) -> tuple[Parameters, Loader]:
    """Return the parameters of one of an engine's ranks, and the loader that fills them."""
    places = {name: _place(name, shape, rank, ranks) for name, shape in shapes.items()}
    sizes: dict[str, list[int]] = {}
    for to, expert, half, shape, _ in places.values():
        size = sizes.setdefault(to, [0, 0, *shape])
        size[0], size[1] = max(size[0], expert + 1), max(size[1], half + 1)
    parameters = {}
    for to, (experts, halves, *shape) in sizes.items():
        whole = [shape[0] * halves, *shape[1:]] if ".experts" not in to else [experts, shape[0] * halves, *shape[1:]]
        parameters[to] = torch.empty(whole, dtype=torch.bfloat16, device=device)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            to, expert, half, shape, dim = places[name]
            into = parameters[to][expert] if ".experts" in to else parameters[to]
            mine = weight if dim is None else weight.narrow(dim, rank * shape[dim], shape[dim])
            into.narrow(0, half * shape[0], shape[0]).copy_(mine)

    return parameters, load


def _place(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> tuple[str, int, int, list[int], int | None]:
    """Return where a tensor goes: the parameter, its expert, its half, and how much of which axis a rank has."""
    *parts, kind, _ = name.split(".") if not name.endswith("bias") else (*name.split("."), "")
    before, expert = ".".join(parts), 0
    if parts and parts[-1].isdigit() and "experts" in parts:
        before, expert = ".".join(parts[:-1]), int(parts[-1])
    fused = kind in ("gate_proj", "up_proj")
    dim = 0 if fused or kind in ROWS else 1 if kind in COLUMNS else None
    own = [size // ranks if axis == dim else size for axis, size in enumerate(shape)]
    return f"{before}.{'gate_up' if fused else kind}", expert, int(kind == "up_proj"), own, dim


def traced(shapes: Shapes, rank: int, ranks: int) -> st.Trace:
    parameters, load = engine(shapes, rank, ranks, "meta")
    sources = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    return st.trace(lambda tensors: load(tensors.items()), sources, into=lambda: parameters)


# What traces cost.


def seconds_of(shapes: Shapes) -> dict[str, float]:
    """Return the processor's seconds of a trace, of what it reads, and of its inverse."""
    begin = time.process_time()
    found = traced(shapes, 0, 1)
    ends = [time.process_time()]
    for step in (found.reads, found.inverse):
        step()
        ends.append(time.process_time())
    return {name: end - start for name, start, end in zip(MOST, [begin, *ends], ends, strict=False)}


def _tracing(config: Config, rank: int, ranks: int) -> Action:
    traced(shapes_of(SMALL), 0, 1)  # so that what tracing imports isn't counted

    def action() -> int:
        seconds_of(shapes_of(config))
        return 0

    return action


def cost_bars(settings: Settings, folder: Path) -> list[Bar]:
    config = SMALL if settings.quick else Config()
    shapes = shapes_of(config)
    of = f"{len(shapes):,} tensors"
    found = [Bar(f"{of}: {name}", "", each, None, each, MOST[name]) for name, each in seconds_of(shapes).items()]
    memory = peak(partial(_tracing, config), folder).own / 2**20
    return [*found, Bar(f"{of}: memory of all three", "", memory, None, memory, MOST["memory"], "MiB")]


def loader_bar(settings: Settings) -> Bar:
    """Return the processor's milliseconds for each tensor of a loader with weight loaders, shard ids and experts."""
    layers, experts = (1, 4) if settings.quick else (24, 128)
    traced_loader(1, 4)  # so that what tracing imports isn't counted
    begin = time.process_time()
    _, count = traced_loader(layers, experts)
    each = 1000 * (time.process_time() - begin) / count
    return Bar(f"{LOADER}: {count:,} tensors", "", each, None, each, MOST_OF_LOADER, "ms", "for each tensor")


def growth() -> list[Panel]:
    """Return a panel for each step: seconds by tensors, of DeepSeek-V3 and of one with a 256th of its bytes."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, config in {"DeepSeek-V3": Config(), "a 256th of its bytes": THIN}.items():
        for layers in LAYERS:
            shapes = shapes_of(replace(config, layers=layers))
            for step, taken in seconds_of(shapes).items():
                found.setdefault(step, {}).setdefault(name, []).append((len(shapes), taken))
    return [
        Panel(step, "tensors", "s", tuple(Curve(name, tuple(points)) for name, points in curves.items()))
        for step, curves in found.items()
    ]


# What loading through traces saves.


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return a tensor's bits as integers, in parts that are small beside what a load takes."""
    return torch.split(tensor.view(torch.int16).flatten(), 2**17)


def _load_traced(parameters: Parameters, folder: Path, shapes: Shapes, rank: int, ranks: int) -> None:
    st.load(parameters, str(folder), transform=traced(shapes, rank, ranks), donate=True, world=one_process())


def _loading(how: str, config: Config, folder: Path, rank: int, ranks: int) -> Action:
    shapes = shapes_of(config)
    parameters, load = engine(shapes, rank, ranks, "cpu")
    for each in parameters.values():
        each.zero_()  # so that memory is there
    files = sorted(folder.glob("*.safetensors"))
    if how == TRACED:  # so that what loading imports isn't counted, as what the others import isn't
        _load_traced(engine(shapes_of(SMALL), 0, 1, "cpu")[0], folder.with_name("small"), shapes_of(SMALL), 0, 1)

    def through_trace() -> None:
        _load_traced(parameters, folder, shapes, rank, ranks)

    def read() -> None:
        for file in files:
            load(safetensors.torch.load(file.read_bytes()).items())

    def mapped() -> None:
        for file in files:
            with safetensors.safe_open(file, "pt") as opened:
                load((name, opened.get_tensor(name)) for name in opened.offset_keys())

    def action() -> int:
        begin, busy = time.perf_counter(), time.process_time()
        {TRACED: through_trace, READ: read, MAPPED: mapped}[how]()
        told = [time.perf_counter() - begin, time.process_time() - busy]
        summed = {name: sum(int(part.sum()) for part in _parts(each)) for name, each in parameters.items()}
        (folder / f"told-{rank}.json").write_text(json.dumps([*told, summed]))
        return 0

    return action


def load_bars(settings: Settings, where: Path) -> list[Bar]:
    """Return seconds and memory of loads through traces, each beside what is usual, in turns."""
    config = SMALL if settings.quick else SERVED
    shapes, ranks = shapes_of(config), 2 if settings.quick else RANKS
    folder = where / "model"
    make_folder(folder, shapes, 8)
    make_folder(where / "small", shapes_of(SMALL), 1)
    names, found = (TRACED, READ, MAPPED), dict[str, list[tuple[float, float, float]]]()
    sums = set()
    for _ in range(1 if settings.quick else 3):
        for how in names:
            seen = peak(partial(_loading, how, config, folder), where, ranks)
            told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(ranks)]
            wall, busy = max(each[0] for each in told), sum(each[1] for each in told)
            found.setdefault(how, []).append((wall, busy, seen.own / 2**20))
            sums.add(json.dumps([each[2] for each in told]))
    if len(sums) > 1:
        raise ValueError("ranks loaded different weights")
    of = f"{nbytes_of(shapes) / 1e9:.3g} GB into {ranks} ranks"
    best = {how: [min(each) for each in zip(*turns, strict=True)] for how, turns in found.items()}
    # Seconds of the clock are the others' too, where the machine is busy.
    most = {("seconds of processors", MAPPED): 1.3}
    units = {"seconds": "s", "seconds of processors": "s", "memory beside the parameters, a rank": "MiB"}
    return [
        Bar(f"{of}: {what}", how, ours, other, ours / other, most.get((what, how)), unit)
        for (what, unit), ours, *others in zip(units.items(), *(best[how] for how in names), strict=True)
        for how, other in zip(names[1:], others, strict=True)
    ]


def bars(settings: Settings) -> list[Bar]:
    """Measure, print a table for each part, and return its bars."""
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-trace-") as where:
        parts: Mapping[str, list[Bar]] = {
            "What traces cost": [*cost_bars(settings, Path(where)), loader_bar(settings)],
            "An engine's ranks, through traces": load_bars(settings, Path(where)),
        }
    for title, rows in parts.items():
        print_bars(title, rows, settings.console)
    return [bar for rows in parts.values() for bar in rows]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    asked = parser("benchmarks.trace", __doc__)
    asked.add_argument("--plot", type=Path, help="a file for an SVG of how seconds grow with tensors; a minute more")
    options = asked.parse_args(arguments)
    found = bars(settings_of(options))
    if options.plot:
        options.plot.write_text(plot("Seconds of traces by tensors", growth(), columns=3))
    return finish(found, options)


if __name__ == "__main__":
    sys.exit(main())
