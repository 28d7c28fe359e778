"""`shardtree verify`: every byte of a checkpoint compared with its checksum."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from ..checkpoint import verify
from ..errors import plural, shorten
from ..storage import storage_at
from ..strategies import Damage, LoadOptions, VerifyReport, by_reason
from ._contents import files_in
from ._output import Output, bar, json_text, pace, printable, size, spellable


def run_verify(checkpoint: str, *, threads: int | None, as_json: bool) -> int:
    """Print what is damaged in a checkpoint, and return the exit status: 0 where nothing is, else 1.

    Args:
        checkpoint: a path or URL.
        threads: how many read and check; None for the usual number.
        as_json: whether to print JSON.

    Raises:
        CheckpointingException: there is no checkpoint, or nothing to check it by.
    """
    storage, began = storage_at(checkpoint), time.monotonic()
    files, reports = files_in(storage), list[VerifyReport]()
    # The bar is on stderr, so that stdout can be piped; without the length of all files it has no end to show.
    with bar(Output(stderr=True), "verify", files.length if files.is_all else None) as advance:
        damage = verify(storage, options=LoadOptions(threads=threads, progress=advance), report=reports.append)
    (report,) = reports
    if as_json:
        print(json_text(_document(checkpoint, report, damage)))
    else:
        _show(
            Output(),
            checkpoint,
            damage,
            f"{size(report.bytes_read)} read {pace(report.bytes_read, time.monotonic() - began)}",
        )
        _show_unchecked(Output(), report)
    # Bytes without a checksum aren't damage: most formats of other programs have some.
    return 1 if damage else 0


def _show(console: Console, where: str, damage: Sequence[Damage], amount: str) -> None:
    if not damage:
        mark = (spellable(console)("✓ "), "bold green")
        console.print(Text.assemble(mark, f"no damage found in {printable(where)}: {amount}"))
        return
    for one in damage:
        _show_one(console, one)
    files = plural(len({one.file for one in damage}), "file")
    mark = (spellable(console)("✗ "), "bold red")
    console.print(Text.assemble(mark, f"{printable(where)} is damaged in {files}. {amount}"))


def _show_one(console: Console, one: Damage) -> None:
    # An end of 0: the file is damaged or missing as a whole.
    place = f", bytes {one.begin:,} to {one.end:,}" if one.end else ""
    console.print(Text.assemble((printable(one.file), "bold red"), place))
    lines = one.what.split("\n")
    for line in (*lines, *(f"  {held}" for held in shorten(one.holds))):
        console.print(Text(f"    {printable(line)}"))


def _show_unchecked(console: Console, report: VerifyReport) -> None:
    """Print how many bytes have no checksum, by the reason."""
    for why, found in by_reason(report.unchecked).items():
        amount = f"{size(sum(one.nbytes for one in found))} in {plural(len(found), 'file')}"
        console.print(Text(f"  no checksum for {amount}: {printable(why)}"))


def _document(where: str, report: VerifyReport, damage: Sequence[Damage]) -> dict[str, object]:
    """Return what docs/command-line.md describes."""
    return {
        "checkpoint": where,
        "sound": not damage,
        "bytes_read": report.bytes_read,
        "bytes_unchecked": report.unchecked_nbytes,
        "damage": [asdict(one) for one in damage],
        "unchecked": [asdict(one) for one in report.unchecked],
    }
