"""`shardtree explain`: whether a load in another layout would succeed, and what each rank would read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from ..checkpoint import explain_ranks, open_checkpoint
from ..errors import plural
from ..plans import Explanation, ReadCost
from ..strategies import LoadOptions
from ._contents import check_patterns, contents_at, matcher
from ._layouts import MeshLayout, stored_trees, trees_on_mesh, whole_tensors
from ._output import Output, json_text, printable, show_verdict, working


def run_explain(
    checkpoint: str,
    layout: MeshLayout | None,
    *,
    like: str | None,
    patterns: Sequence[str],
    cast: bool,
    as_json: bool,
    options: LoadOptions,
) -> int:
    """Print what a load would do, and return the exit status: 1 where it would fail.

    Args:
        checkpoint: a path or URL.
        layout: how the checkpoint's own tensors are wanted; None for as they are stored.
        like: another checkpoint, whose tensors are wanted instead.
        patterns: of the keys that are wanted; none for all.
        cast: whether dtypes are converted.
        as_json: whether to print JSON.
        options: how the checkpoint would be read.

    Raises:
        CheckpointingException: a checkpoint can't be opened, or the layout doesn't fit its tensors.
    """
    with working("reading what is stored"):
        stored = open_checkpoint(checkpoint, options=options)
        model = stored if like is None else open_checkpoint(like, options=options)
        check_patterns("explain", patterns, contents_at(model))
        matches = matcher(patterns)
        trees = stored_trees(model, matches) if layout is None else trees_on_mesh(whole_tensors(model, matches), layout)
    with working(f"planning the reads of {plural(len(trees), 'rank')}"):
        explanation = explain_ranks(trees, checkpoint, cast=cast, options=options)
    # A layout is one of tensors, and a selection leaves out on purpose: neither forgets what it lacks.
    tensors = {} if patterns else whole_tensors(stored, matches)
    explanation = replace(explanation, missing=tuple(key for key in explanation.missing if key in tensors))
    if as_json:
        print(json_text({"checkpoint": checkpoint, **_document(explanation)}))
    else:
        _show(Output(), explanation)
    return 1 if explanation.ok is False else 0


def _show(console: Console, explanation: Explanation) -> None:
    first, *rest = str(explanation).split("\n")
    show_verdict(console, explanation.ok is not False, first)
    for line in rest:
        console.print(Text(printable(line)))
    if len(explanation.reads) == 1 and explanation.ok is not False:
        console.print(Text(f"{plural(1, 'rank')}: --ranks, --mesh with --spec, or --like ask for more.", style="dim"))


def _document(explanation: Explanation) -> dict[str, Any]:
    """Return what docs/command-line.md describes."""
    return {
        "ok": explanation.ok,
        "problems": list(map(str, explanation.problems)),
        "undecided": list(map(str, explanation.undecided)),
        "missing": list(explanation.missing),
        "left_out": list(explanation.left_out),
        "unfilled": list(explanation.unfilled),
        "total": _cost(explanation.cost),
        "ranks": [
            {
                "rank": one.rank,
                "shards": one.shards,
                "objects": one.objects,
                "reads": _cost(one.cost),
                "sent": one.sent,
                "received": one.received,
            }
            for one in explanation.reads
        ],
    }


def _cost(cost: ReadCost | None) -> dict[str, Any] | None:
    return None if cost is None else asdict(cost)
