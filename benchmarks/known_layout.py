"""What it costs to exchange layouts, and to know them: ``python -m benchmarks.known_layout --ranks 64 --tensors 300``.

First what one rank says and does, once with the layouts of all ranks exchanged and once with ``layout=``; then a whole
save and load of all ranks as threads of one process, tensors passed on between them, where everything that every rank
does adds up.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import shardtree as st
from shardtree.checkpoint._consistency import check_together, describe, known_layout
from shardtree.layouts import TensorKind, mesh_columns, mesh_shards, rank_leaf, tensor_shards

SPECS = (st.PartitionSpec("tp"), st.PartitionSpec("tp", "dp"), st.PartitionSpec(("dp", "tp")))
Row = tuple[str, str, str]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table; returns 0."""
    options = _parser().parse_args(arguments)
    mesh = st.Mesh(dp=options.ranks // options.tp, tp=options.tp)
    kinds = {f"layer.{n}.weight": TensorKind(torch.float32, (64, 64 + n % 20 * 8), 0) for n in range(options.tensors)}
    specs = {key: SPECS[number % len(SPECS)] for number, key in enumerate(kinds)}
    computed, columns = _seconds(partial(mesh_columns, kinds, mesh, specs), options.rounds)
    trees: list[dict[str, Any]] = [{} for _ in range(mesh.size)]
    for key, kind in kinds.items():
        for part in mesh_shards(kind.global_shape, mesh, specs[key]):
            trees[part.rank][key] = rank_leaf(key, torch.zeros(part.shape), torch.float32, part)
    rows = [("computing the layout of all ranks, once", "", f"{computed * 1e3:.1f} ms")]
    rows += _of_one_rank(trees, columns, options.rounds)
    rows += [_together(what, trees, columns) for what in ("save", "load")]
    table = Table(title=f"{mesh.size} ranks, {options.tensors} tensors, {len(columns)} shards")
    for name in ("", "exchanged", "known"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0


def _of_one_rank(trees: Sequence[Any], columns: st.layouts.ShardColumns, rounds: int) -> list[Row]:
    shards, ranks = [tensor_shards(tree) for tree in trees], len(trees)
    match = partial(known_layout, "save", columns, shards[0], 0, ranks)
    matched, known = _seconds(match, rounds)
    told = [pickle.dumps(describe(own, (), rank, ranks=len(shards))) for rank, own in enumerate(shards)]
    brief = [describe(own, (), rank, known=known, ranks=len(shards)) for rank, own in enumerate(shards)]
    described, _ = _seconds(lambda: describe(shards[0], (), 0, ranks=len(shards)), rounds)
    unpacked, full = _seconds(lambda: [pickle.loads(each) for each in told], rounds)
    checks = [_seconds(partial(check_together, "save", *each), rounds)[0] for each in ((full,), (brief, known))]
    return [
        ("bytes that a rank says", f"{len(told[0]):,}", f"{len(pickle.dumps(brief[0])):,}"),
        ("describing and unpacking, or matching", f"{(described + unpacked) * 1e3:.1f} ms", f"{matched * 1e3:.1f} ms"),
        ("checking", f"{checks[0] * 1e3:.1f} ms", f"{checks[1] * 1e3:.1f} ms"),
    ]


def _together(what: str, trees: Sequence[Any], columns: st.layouts.ShardColumns) -> Row:
    """Return how long a save or load of all ranks takes without and with the layout."""
    seconds = []
    for layout in (None, columns):
        folder = st.storage.MemoryStorage()
        save = partial(_save, trees, folder, layout)
        begin = time.perf_counter()
        st.simulate(len(trees), save)
        middle = time.perf_counter()
        st.simulate(len(trees), partial(_load, trees, folder, layout))
        seconds.append(middle - begin if what == "save" else time.perf_counter() - middle)
    return f"a whole {what}, all ranks in one process", f"{seconds[0]:.1f} s", f"{seconds[1]:.1f} s"


def _save(trees: Sequence[Any], folder: Any, layout: Any, world: st.World) -> None:
    st.save(trees[world.rank], folder, world=world, layout=layout)


def _load(trees: Sequence[Any], folder: Any, layout: Any, world: st.World) -> None:
    st.load(trees[world.rank], folder, world=world, layout=layout, options=st.LoadOptions(exchange="always"))


def _seconds(job: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        value = job()
        taken.append(time.perf_counter() - begin)
    return median(taken), value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.known_layout", description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tp", type=int, default=8, help="of these ranks (default: 8)")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    return parser


if __name__ == "__main__":
    sys.exit(main())
