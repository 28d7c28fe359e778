"""`shardtree explain`, `plan` and `trace`: previews of a load, of a move between ranks, and of loading code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.text import Text

from ..errors import plural
from ..inspection import OpenCheckpoint, explain_ranks, open_checkpoint
from ..live.resharding import plan_reshard
from ..shell.table import LoadOptions
from ..traces import Trace, trace, transformed
from ._contents import check_patterns, contents_at, matcher
from ._layouts import MeshLayout, RankTree, stored_trees, trees_on_mesh, whole_tensors
from ._output import Output, json_text, printable, show_verdict, working


def run_explain(
    checkpoint: str,
    layout: MeshLayout | None,
    *,
    like: str | None,
    patterns: Sequence[str],
    cast: bool,
    plain: Sequence[str],
    as_json: bool,
    options: LoadOptions,
) -> int:
    """Print the preview of a load, and return the exit status: 1 if the load would fail.

    Args:
        checkpoint: Path or URL of the checkpoint.
        layout: Wanted layout of the tensors; None keeps the stored one.
        like: Path or URL of another checkpoint whose tensors are wanted; None for the tensors of `checkpoint`.
        patterns: Patterns of the wanted keys; none means all.
        cast: True to convert dtypes.
        plain: Key patterns of FP8 tensors that may be cast without scales.
        as_json: True to print JSON.
        options: Options of the reads.

    Raises:
        CheckpointingException: A checkpoint can't be opened, or the layout doesn't fit its tensors.
    """
    with working("reading what is stored"):
        source = open_checkpoint(checkpoint, options=options)
        model = source if like is None else open_checkpoint(like, options=options)
        check_patterns("explain", patterns, contents_at(model))
        trees = _trees(model, layout, patterns)
    with working(f"planning the reads of {plural(len(trees), 'rank')}"):
        explanation = explain_ranks(trees, checkpoint, cast=cast, plain=plain, options=options)
    # A layout has only tensors, and a selection omits keys on purpose, so that other keys don't count as missing.
    tensors = {} if patterns else whole_tensors(source, matcher(patterns))
    explanation = replace(explanation, missing=tuple(key for key in explanation.missing if key in tensors))
    is_ok = explanation.ok is not False  # None means that only values can tell.
    if as_json:
        record = {
            "checkpoint": checkpoint,
            "ok": explanation.ok,
            "problems": list(map(str, explanation.problems)),
            "undecided": list(map(str, explanation.undecided)),
            "missing": list(explanation.missing),
            "left_out": list(explanation.left_out),
            "unfilled": list(explanation.unfilled),
            "kept": list(explanation.kept),
            "total": explanation.cost and asdict(explanation.cost),
            "ranks": [
                {
                    "rank": read.rank,
                    "shards": read.shards,
                    "objects": read.objects,
                    "reads": read.cost and asdict(read.cost),
                    "sent": read.sent,
                    "received": read.received,
                }
                for read in explanation.reads
            ],
        }
        print(json_text(record))
        return 0 if is_ok else 1
    console, (first, *lines) = Output(), str(explanation).split("\n")
    show_verdict(console, is_ok, first)
    for line in lines:
        console.print(Text(printable(line)))
    if len(explanation.reads) == 1 and is_ok:
        console.print(Text(f"{plural(1, 'rank')}: --ranks, --mesh with --spec, or --like ask for more.", style="dim"))
    return 0 if is_ok else 1


def run_plan(
    source: str,
    target: str | None,
    *,
    before: MeshLayout | None,
    after: MeshLayout | None,
    patterns: Sequence[str],
    origins: bool,
    cast: bool,
    plain: Sequence[str],
    as_json: bool,
) -> int:
    """Print the plan of the bytes that move between ranks, and return the exit status 0.

    Args:
        source: Path or URL of the checkpoint whose tensors move.
        target: Path or URL of the checkpoint whose tensors are wanted; None for the source.
        before: Layout of the source's tensors; None for the stored one.
        after: Layout of the target's tensors; None for the stored one.
        patterns: Patterns of the wanted keys; none means all.
        origins: True to print the origin of each box of each tensor.
        cast: True to convert dtypes.
        plain: Key patterns of FP8 tensors that may be cast without scales.
        as_json: True to print JSON.

    Raises:
        CheckpointingException: A checkpoint can't be opened, or its tensors can't get the wanted layout.
    """
    source_tree = open_checkpoint(source)
    target_tree = source_tree if target is None else open_checkpoint(target)
    check_patterns("plan", patterns, contents_at(target_tree))
    trees = [list(_trees(tree, layout, patterns)) for tree, layout in ((source_tree, before), (target_tree, after))]
    plan = plan_reshard(*trees, cast=cast, plain=plain)
    if as_json:
        totals = zip(plan.ranks, plan.sent.values(), plan.received.values(), plan.kept.values(), strict=True)
        record = {
            "bytes_moved": plan.bytes_moved,
            "lower_bound": plan.lower_bound,
            "bytes_kept": plan.bytes_kept,
            "ranks": [dict(zip(("rank", "sends", "gets", "keeps"), row, strict=True)) for row in totals],
            "links": [
                {"from": sender, "to": receiver, "bytes": count} for (sender, receiver), count in plan.links.items()
            ],
            "plan": json.loads(plan.to_json()),
        }
        print(json_text(record))
        return 0
    console = Output()
    texts = [str(plan), *((str(plan.explain(key)) for key in plan.target.keys) if origins else ())]
    for line in "\n\n".join(texts).split("\n"):
        console.print(Text(printable(line)))
    return 0


def _trees(tree: OpenCheckpoint, layout: MeshLayout | None, patterns: Sequence[str]) -> Sequence[RankTree]:
    matches = matcher(patterns)
    return stored_trees(tree, matches) if layout is None else trees_on_mesh(whole_tensors(tree, matches), layout)


# This section traces loading code.


Loader = Callable[[Any], Any] | Trace
"""Loading code: a function from tensors by name to tensors by name; or its trace."""


def run_trace(loader: Loader, checkpoint: str, other: Loader | None, *, as_json: bool) -> int:
    """Print the trace of loading code, and return the exit status: 1 for problems or a difference, else 0.

    Args:
        loader: Loading code, or its trace.
        checkpoint: Path or URL of the checkpoint whose tensors are the code's inputs.
        other: Another loader of the same model to compare with; None for none.
        as_json: True to print JSON.

    Raises:
        CheckpointingException: The checkpoint can't be read, or the code asks for elements of tensors.
    """
    with working("reading what is stored"):
        source = open_checkpoint(checkpoint)
    with working("tracing"):
        trace = traced(loader, source)
        problems = trace.check()
        differing = {} if other is None else trace.diff(traced(other, source))
    differences = [difference for of_output in differing.values() for difference in of_output]
    if as_json:
        record = {
            "checkpoint": checkpoint,
            "outputs": {name: str(kind) for name, kind in trace.outputs.items()},
            "problems": list(map(asdict, problems)),
            "differences": list(map(asdict, differences)),
        }
        print(json_text(record))
        return 1 if problems or differences else 0
    console = Output()
    for line in (*str(trace).split("\n"), *map(str, problems), *map(str, differences)):
        console.print(Text(printable(line)))
    words = plural(len(problems), "problem") if problems else "each element is used and made once"
    show_verdict(console, not problems, words)
    if other is not None:
        words = (
            f"the two loaders differ in {plural(len(differing), 'output')}"
            if differing
            else "the two loaders are equal"
        )
        show_verdict(console, not differing, words)
    return 1 if problems or differences else 0


def traced(loader: Loader, sources: Any) -> Trace:
    """Return the trace of loading code on the given sources; a loader that is a trace already is returned unchanged."""
    return loader if isinstance(loader, Trace) else trace(loader, sources)


def through(loader: Loader) -> Callable[[Any], Any]:
    """Return a function that applies loading code to a tree of shards, as a transform of `convert`."""
    return lambda tree: transformed(traced(loader, tree), tree, "convert")
