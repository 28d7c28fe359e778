"""The commands of `shardtree series`, and their options; each imports its code when it runs, like those of `_app`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ._command import Command, CommandGroup, Json

series = typer.Typer(
    cls=CommandGroup,
    help="List the steps of a run, name the newest, pin steps, and remove those that a policy does not keep.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_command = partial(series.command, cls=Command)

_Root = Annotated[str, typer.Argument(metavar="FOLDER", help="The folder of a run's steps, or its URL.")]
_Names = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Format of the names of steps' folders, as 'step_{:08d}'. Needed if finished steps have several formats.",
    ),
]
_Steps = Annotated[list[int], typer.Argument(metavar="STEP...", min=0, help="Numbers of steps.")]


@_command(
    "list",
    epilog="Example: shardtree series list run --limit 20\n\nExit status: 0; 2 if no step is finished.",
)
def list_(
    root: _Root,
    names: _Names = None,
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Rows of the table.", show_default="all")
    ] = None,
    as_json: Json = False,
) -> int:
    """Show the finished steps with sizes and metrics, and the folders that aren't finished."""
    from ._series import run_list

    return run_list(root, names, limit=limit, as_json=as_json)


@_command(
    epilog="Example: shardtree convert $(shardtree series latest run --verified) model --to hf\n\n"
    "Exit status: 0; 1 if no step is finished; 2 trouble."
)
def latest(
    root: _Root,
    names: _Names = None,
    verified: Annotated[
        bool, typer.Option("--verified", help="Skip damaged steps: read steps, newest first, until one is undamaged.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Print the path of the newest finished step."""
    from ._series import run_latest

    return run_latest(root, names, is_verified=verified, as_json=as_json)


@_command(epilog="Example: shardtree series pin run 1000 2000\n\nExit status: 0; 2 if there is no such step.")
def pin(root: _Root, steps: _Steps, names: _Names = None, as_json: Json = False) -> int:
    """Pin steps, so that no policy removes them."""
    from ._series import run_pin

    return run_pin(root, names, steps, is_pinned=True, as_json=as_json)


@_command(epilog="Example: shardtree series unpin run 1000\n\nExit status: 0; 2 if there is no such step.")
def unpin(root: _Root, steps: _Steps, names: _Names = None, as_json: Json = False) -> int:
    """Unpin steps, so that policies may remove them again."""
    from ._series import run_pin

    return run_pin(root, names, steps, is_pinned=False, as_json=as_json)


@_command(
    epilog="Example: shardtree series prune run --keep-last 3 --keep-best 1:loss --keep-every 1000 --yes\n\n"
    "Exit status: 0; 1 if a step that should go stays, such as one that is being saved; 2 trouble."
)
def prune(
    root: _Root,
    names: _Names = None,
    keep_last: Annotated[int | None, typer.Option(min=0, metavar="N", help="Keep the newest N.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep steps whose number is a multiple of N.")
    ] = None,
    keep_for: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Keep steps saved within this time before the newest, as 7d or 12h."),
    ] = None,
    keep_every_seconds: Annotated[
        str | None, typer.Option(metavar="TIME", help="Keep one step for each such interval, as 3600 or 1h.")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N:METRIC[:max]",
            help="Keep the best N by a metric, and steps without it; without :max, the smallest are best. Repeatable.",
        ),
    ] = None,
    keep_step: Annotated[
        list[int] | None, typer.Option(min=0, metavar="STEP", help="Keep this step. Repeatable.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Keep the numbers of steps that a function of the listing returns. The whole file is executed."
            " Repeatable.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove the steps that go. Without it, nothing is changed.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Show the steps that stay and those that go; --yes removes the latter. A step stays if any option keeps it.

    The newest finished step and pinned ones always stay.
    """
    options = (keep_last, keep_every, keep_for, keep_every_seconds, keep_best, keep_step, policy)
    if all(option in (None, []) for option in options):
        raise typer.BadParameter("say which steps stay, for example --keep-last 3")
    from ._names import seconds_named
    from ._prune import Kept, run_prune

    kept = Kept(
        last=keep_last,
        every=keep_every,
        seconds=None if keep_for is None else seconds_named(keep_for),
        every_seconds=None if keep_every_seconds is None else seconds_named(keep_every_seconds),
        best=tuple(keep_best or ()),
        steps=tuple(keep_step or ()),
        policies=tuple(policy or ()),
    )
    return run_prune(root, names, kept, is_removing=yes, as_json=as_json)


@_command(
    epilog="Example: shardtree series clean run\n\n"
    "Exit status: 0; 1 if unfinished folders are left, such as those of saves in progress; 2 trouble."
)
def clean(
    root: _Root,
    names: _Names = None,
    stale_after: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time without a change after which a save of another machine counts as killed. A save of this machine"
            " counts as killed once its process is gone.",
        ),
    ] = "1h",
    as_json: Json = False,
) -> int:
    """Remove the leftovers of killed saves, and finish interrupted removals."""
    from ._names import seconds_named
    from ._prune import run_clean

    return run_clean(root, names, stale_after=seconds_named(stale_after), as_json=as_json)
