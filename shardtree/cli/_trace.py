"""`shardtree trace`: what loading code makes of a checkpoint's tensors, what it forgets, and how two loaders differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.text import Text

from ..checkpoint import open_checkpoint
from ..errors import plural
from ..traces import Trace, trace, transformed
from ._output import Output, json_text, printable, show_verdict, working

Loader = Callable[[Any], Any] | Trace
"""Loading code, from tensors by name to tensors by name; or what it was traced to."""


def run_trace(loader: Loader, checkpoint: str, other: Loader | None, *, as_json: bool) -> int:
    """Print what loading code does to a checkpoint's tensors, and return the exit status: 1 where something is wrong.

    Args:
        loader: the code.
        checkpoint: a path or URL.
        other: another loader of the same model, to compare with; None for none.
        as_json: whether to print JSON.

    Raises:
        CheckpointingException: the checkpoint can't be read, or the code asks for what tensors hold.
    """
    with working("reading what is stored"):
        stored = open_checkpoint(checkpoint)
    with working("tracing"):
        found = traced(loader, stored)
        problems = found.check()
        differing = {} if other is None else found.diff(traced(other, stored))
    differences = [each for some in differing.values() for each in some]
    if as_json:
        record = {
            "checkpoint": checkpoint,
            "outputs": {name: str(kind) for name, kind in found.outputs.items()},
            "problems": list(map(asdict, problems)),
            "differences": list(map(asdict, differences)),
        }
        print(json_text(record))
        return 1 if problems or differences else 0
    console = Output()
    for line in (*str(found).split("\n"), *map(str, problems), *map(str, differences)):
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
    """Return what loading code does to tensors."""
    return loader if isinstance(loader, Trace) else trace(loader, sources)


def through(loader: Loader) -> Callable[[Any], Any]:
    """Return loading code as a function of the tree of shards, which converts it."""
    return lambda tree: transformed(traced(loader, tree), tree, "convert")
