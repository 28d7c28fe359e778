"""The commands and their options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CheckpointingException

app = typer.Typer(
    help="Sharded state dicts as immutable trees, saved in one layout and loaded in any other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        root = __name__.partition(".")[0]
        typer.echo(f"{root} {sys.modules[root].__version__}")
        raise typer.Exit


@app.callback()
def _shardtree(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    # A callback makes `demo` a command even while it is the only one.
    del version


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Processes that save.")] = 4,
    load_ranks: Annotated[int, typer.Option(min=1, max=64, help="Processes that load.")] = 2,
    keep: Annotated[
        Path | None, typer.Option(help="Save to this folder, and leave the checkpoint there.", metavar="DIR")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="A tiny encoder with made-up weights: seconds less.")] = False,
) -> None:
    """Save an encoder's training state from several processes, load it in another layout, and check every element."""
    from ._demo import run_demo

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not know box characters
    try:
        passed = run_demo(ranks=ranks, load_ranks=load_ranks, keep=keep, small=small)
    except CheckpointingException as error:
        typer.echo(f"shardtree demo: {error}", err=True)
        raise typer.Exit(1) from error
    if not passed:
        raise typer.Exit(1)
