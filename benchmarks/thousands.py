"""What one rank of thousands does and hears until a save or a load is agreed: ``python -m benchmarks.thousands``.

4,096 ranks and 50,000 tensors: a model of experts with EP, PP, TP and HSDP. One rank is real: it calls `save` and
`load`. What the others say is made and packed beforehand. Agreement ends where a rank knows what it writes, or may
begin to read; the commit is told apart. Each case has a new process. Seconds are the processor's, of a second call.
Memory is all that the process has at its peak, with torch (about 0.25 GB) and the messages of all ranks.

Growth is plotted beside that of DCP's planners, whose coordinator gets the plans of all ranks; `--plot FILE` stores it.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

import shardtree as st
from shardtree.layouts import ShardColumns
from shardtree.shell.checkpoint.saving import _start
from shardtree.shell.table import Exchange, new_save_id

from ._many import (
    DTYPE,
    Case,
    Enough,
    Lap,
    ManyFiles,
    OneOfMany,
    by_rank,
    layout,
    lengths_of,
    tree_of,
    voices,
)
from ._measuring import (
    Action,
    Bar,
    Curve,
    Panel,
    Settings,
    finish,
    parser,
    peak,
    plot,
    print_bars,
    resident,
    settings_of,
)
from .planning import finished, global_save_plan, placed_tensor, save_planner


def dcp_tree(columns: ShardColumns) -> dict[str, Any]:
    """Return one rank's tensors, which know their places, so that DCP's arithmetic of meshes isn't counted."""
    tree: dict[str, Any] = {}
    rows = zip(columns.key.tolist(), columns.offset.tolist(), columns.shape.tolist(), strict=True)
    for number, offset, shape in rows:
        whole = columns.kinds[number].global_shape
        skip = len(shape) - len(whole)
        tree[columns.keys[number]] = placed_tensor(whole, tuple(offset[skip:]), tuple(shape[skip:]), DTYPE)
    return tree


def packed_plans(case: Case) -> list[bytes]:
    """Return each rank's local plan, as it travels to the coordinator."""
    parts = by_rank(layout(case), case.ranks)
    plans = (save_planner(dcp_tree(part), rank).create_local_plan() for rank, part in enumerate(parts))
    return [pickle.dumps(plan) for plan in plans]


def dcp_seconds(tree: dict[str, Any], packed: Sequence[bytes]) -> float:
    """Return the processor seconds of the coordinator until each rank can be told what it writes."""
    begin = time.process_time()
    planner = save_planner(tree, 0)
    planner.create_local_plan()
    plans, _ = global_save_plan(planner, [pickle.loads(each) for each in packed])
    finished([planner], plans[:1])
    return time.process_time() - begin


Tree = dict[str, Any]
MOST_SECONDS, MOST_SAID, MOST_A_SHARD, MOST_MEMORY = 10.0, 1e6, 120.0, 2e9
RANKS, TENSORS = (64, 256, 1024, 4096), (5_000, 15_000, 50_000)
KINDS: tuple[dict[str, bool], ...] = ({}, {"known": True}, {"flat": True})
TITLE = "Until a save is agreed by thousands of ranks: seconds of a rank and megabytes that it hears, beside DCP"
BY_RANKS = tuple(Case(ranks, TENSORS[0]) for ranks in RANKS)
BY_TENSORS = tuple(Case(RANKS[-1], tensors) for tensors in TENSORS)
OURS, KNOWN = "layouts exchanged", "layout="
PEER, PEER_TENSORS = "torch DCP's planners", 15_000
"""More tensors would take DCP more memory than most machines of two cores have."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank takes until something is agreed.

    Attributes:
        seconds: of the processor.
        said: bytes.
        heard: bytes, from all ranks.
    """

    seconds: float
    said: int
    heard: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One case's figures.

    Attributes:
        stages: a layout that is passed; until a save is agreed, a load, a load in which ranks read for each other; and
            rank 0's commit, without writing the tensors; of DCP until a save is agreed alone.
        shards: that the rank holds.
        memory: bytes that the process had at its peak; None where nobody looked.
    """

    stages: dict[str, Stage]
    shards: int
    memory: int | None = None


COMPUTE = "the layout is computed"
SAVE_ID = new_save_id()
SAVE, LOAD, TOGETHER, COMMIT = "a save is agreed", "a load is agreed", "and who reads for whom", "rank 0 commits"


def measured(case: Case, peer: bool = False, *, quick: bool = False) -> Measured:
    """Return a case's figures.

    Args:
        case: how many ranks, and of what.
        peer: whether DCP's planners do it.
        quick: whether it is done in this process, where the peak of its memory isn't known.
    """
    prepare = _prepared_peer if peer else _prepared
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if quick:
            prepare(case, folder, 0, 1)
        top = 0 if quick else peak(partial(prepare, case, folder), folder).mapped
        stages, shards = json.loads((folder / "figures.json").read_text())
        return Measured({stage: Stage(*each) for stage, each in stages.items()}, shards, top or None)


def _prepared(case: Case, folder: Path, rank: int, ranks: int) -> Action:
    begin = time.process_time()
    columns = layout(case)
    # Once in a job, before its first save: the layout stays as it is.
    stages = {COMPUTE: (time.process_time() - begin, 0, 0)} if case.known else {}
    own = next(by_rank(columns, case.ranks))
    tree, kept = tree_of(own, case.ranks), dict[str, list[bytes]]()
    known = columns if case.known else None
    run = partial(_agreed, case, tree, known, kept)
    run(columns)  # once, so that what the others say is there, and all modules
    saved, loaded, together = run(None)
    agreed = 1 + [lap.phase for lap in saved].index("save: plan")
    laps = {SAVE: saved[:agreed], LOAD: loaded, TOGETHER: together[len(loaded) :], COMMIT: saved[agreed:]}
    stages |= {stage: _stage(each) for stage, each in laps.items()}
    (folder / "figures.json").write_text(json.dumps((stages, len(own))))

    def action() -> int:
        before = resident()
        run(None)
        return -before  # what was there before counts: all of the process

    return action


def _stage(laps: Sequence[Lap]) -> tuple[float, int, int]:
    return sum(lap.seconds for lap in laps), sum(lap.said for lap in laps), sum(lap.heard for lap in laps)


def _agreed(
    case: Case, tree: Tree, known: ShardColumns | None, kept: dict[str, list[bytes]], columns: ShardColumns | None
) -> tuple[list[Lap], list[Lap], list[Lap]]:
    """Save and load twice, and return what rank 0 did in each; all ranks' columns are needed the first time only."""
    storage = ManyFiles()
    others = {} if columns is None else voices(case, columns, storage)
    if columns is None:
        storage.others.update(lengths_of(kept["save: write"]))
    world = OneOfMany(case.ranks, others, kept)
    # What the others said before is of one save.
    with patch.object(_start, "new_save_id", lambda: SAVE_ID):
        st.save(tree, storage, world=world, layout=known, options=st.SaveOptions(checksums=False))
    loaded = []
    exchanges: dict[Exchange, str] = {"never": "load: check", "always": "load: choose reads"}
    for exchange, last in exchanges.items():
        loading = OneOfMany(case.ranks, others, kept, last=last)
        with suppress(Enough):
            st.load(tree, storage, world=loading, layout=known, options=st.LoadOptions(exchange=exchange))
        loaded.append(loading.laps)
    return world.laps, loaded[0], loaded[1]


def _prepared_peer(case: Case, folder: Path, rank: int, ranks: int) -> Action:
    packed = packed_plans(case)
    tree = dcp_tree(next(by_rank(layout(case), case.ranks)))
    stages = {SAVE: (dcp_seconds(tree, packed), len(packed[0]), sum(map(len, packed)))}
    (folder / "figures.json").write_text(json.dumps((stages, len(tree))))

    def action() -> int:
        before = resident()
        dcp_seconds(tree, packed)
        return -before

    return action


def bars(settings: Settings) -> list[Bar]:
    """Return the bars of the largest case, once in each way in which ranks agree."""
    ranks, tensors = (8, 800) if settings.quick else (RANKS[-1], TENSORS[-1])
    found: list[Bar] = []
    for flags in KINDS:
        case = Case(ranks, tensors, **flags)
        found += _bars(case, measured(case, quick=settings.quick))
    print_bars(f"One of {ranks:,} ranks, {tensors:,} tensors", found, settings.console)
    return found


def _bars(case: Case, got: Measured) -> Iterator[Bar]:
    name, said = case.how, sum(got.stages[stage].said for stage in (SAVE, LOAD))
    for stage, each in got.stages.items():
        seconds = MOST_SECONDS if stage in (COMPUTE, SAVE, LOAD) else None
        yield Bar(f"{name}: {stage}", "", each.seconds, None, each.seconds, seconds)
        if each.heard:
            yield Bar(f"{name}: {stage}", "it hears", each.heard / 1e6, None, each.heard / 1e6, None, "MB")
    # A save and a load together: less than the bar of one.
    yield Bar(f"{name}: a rank says", "", said / 1e3, None, said / 1e3, MOST_SAID / 1e3, "kB")
    shards = got.shards
    yield Bar(f"{name}: a rank says", "", said / shards, None, said / shards, MOST_A_SHARD, "B", f"/ {shards} shards")
    if got.memory is not None:
        memory = got.memory / 1e9
        yield Bar(f"{name}: memory", "", memory, None, memory, MOST_MEMORY / 1e9, "GB", "with torch and messages")


# Growth, beside DCP's


def growth(console: Console) -> list[Panel]:
    """Measure how seconds and bytes grow with ranks and with tensors, print that, and return it as plots."""
    found: dict[tuple[str, Case], Measured] = {}
    for case in dict.fromkeys([*BY_RANKS, *BY_TENSORS]):
        found[OURS, case] = measured(case)
        found[KNOWN, case] = measured(replace(case, known=True))
        if case.tensors <= PEER_TENSORS:
            found[PEER, case] = measured(case, peer=True)
    for (name, case), got in found.items():
        memory = (got.memory or 0) / 1e9
        save = got.stages[SAVE]
        console.print(f"{case}: {name}: {save.seconds:.3f} s, {save.heard / 1e6:.3f} MB heard, {memory:.2f} GB")
    return panels(found)


def panels(found: Mapping[tuple[str, Case], Measured]) -> list[Panel]:
    """Return seconds and bytes as curves by ranks and by tensors, of what was measured by that name in those cases."""
    return [
        Panel(title, x, y, _curves(found, cases, attribute, value))
        for x, cases, attribute in (
            (f"ranks, {TENSORS[0]:,} tensors", BY_RANKS, "ranks"),
            (f"tensors, {RANKS[-1]:,} ranks", BY_TENSORS, "tensors"),
        )
        for title, y, value in (
            ("until a save is agreed", "s", lambda got: got.stages[SAVE].seconds),
            ("what a rank hears until then", "MB", lambda got: got.stages[SAVE].heard / 1e6),
        )
    ]


def _curves(
    found: Mapping[tuple[str, Case], Measured],
    cases: Sequence[Case],
    attribute: str,
    value: Callable[[Measured], float],
) -> tuple[Curve, ...]:
    names = dict.fromkeys(name for name, _ in found)
    return tuple(
        Curve(
            name, tuple((getattr(case, attribute), value(found[name, case])) for case in cases if (name, case) in found)
        )
        for name in names
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    asked = parser("benchmarks.thousands", __doc__)
    asked.add_argument("--plot", type=Path, help="a file for an SVG of growth beside DCP's; ten minutes more")
    options = asked.parse_args(arguments)
    settings = settings_of(options)
    found = bars(settings)
    if options.plot:
        options.plot.write_text(plot(TITLE, growth(settings.console)))
    return finish(found, options)


if __name__ == "__main__":
    sys.exit(main())
