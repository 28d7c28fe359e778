"""`shardtree plan`: which bytes move between ranks when tensors get from one layout into another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ..checkpoint import OpenCheckpoint, open_checkpoint
from ..plans import ReshardPlan, plan_reshard
from ._contents import check_patterns, contents_at, matcher
from ._layouts import MeshLayout, RankTree, stored_trees, trees_on_mesh, whole_tensors
from ._output import Output, json_text, printable


def run_plan(
    source: str,
    target: str | None,
    *,
    before: MeshLayout | None,
    after: MeshLayout | None,
    patterns: Sequence[str],
    origins: bool,
    cast: bool,
    as_json: bool,
) -> int:
    """Print a plan, and return the exit status 0.

    Args:
        source: a checkpoint, whose tensors move.
        target: another one, whose tensors are wanted; None for the source's.
        before: how the source's tensors lie; None for as they are stored.
        after: how the target's tensors are wanted; None for as they are stored.
        patterns: of the keys that are wanted; none for all.
        origins: whether to print where each box of each tensor comes from.
        cast: whether dtypes are converted.
        as_json: whether to print JSON.

    Raises:
        CheckpointingException: a checkpoint can't be opened, or its tensors can't get into that layout.
    """
    held = open_checkpoint(source)
    wanted = held if target is None else open_checkpoint(target)
    check_patterns("plan", patterns, contents_at(wanted))
    trees = [list(_trees(tree, layout, patterns)) for tree, layout in ((held, before), (wanted, after))]
    plan = plan_reshard(*trees, cast=cast)
    if as_json:
        print(json_text(_document(plan)))
    else:
        _show(Output(), plan, origins=origins)
    return 0


def _trees(tree: OpenCheckpoint, layout: MeshLayout | None, patterns: Sequence[str]) -> Sequence[RankTree]:
    matches = matcher(patterns)
    return stored_trees(tree, matches) if layout is None else trees_on_mesh(whole_tensors(tree, matches), layout)


def _show(console: Console, plan: ReshardPlan, *, origins: bool) -> None:
    texts = [str(plan), *((str(plan.explain(key)) for key in plan.target.keys) if origins else ())]
    for line in "\n\n".join(texts).split("\n"):
        console.print(Text(printable(line)))


def _document(plan: ReshardPlan) -> dict[str, Any]:
    """Return what docs/command-line.md describes."""
    totals = zip(plan.ranks, plan.sent.values(), plan.received.values(), plan.kept.values(), strict=True)
    names = ("rank", "sends", "gets", "keeps")
    return {
        "bytes_moved": plan.bytes_moved,
        "lower_bound": plan.lower_bound,
        "bytes_kept": plan.bytes_kept,
        "ranks": [dict(zip(names, row, strict=True)) for row in totals],
        "links": [{"from": sender, "to": receiver, "bytes": count} for (sender, receiver), count in plan.links.items()],
        "plan": json.loads(plan.to_json()),
    }
