"""`shardtree verify`: every byte of a checkpoint compared with its checksum."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from ..checkpoint import check_replicas, verify
from ..errors import plural, shorten
from ..storage import storage_at
from ..strategies import Damage, LoadOptions, VerifyReport, by_reason
from ..world import one_process
from ._contents import files_in
from ._output import Output, bar, json_text, pace, printable, show_verdict, size


def run_verify(checkpoint: str, *, threads: int | None, as_json: bool) -> int:
    """Print what is damaged in a checkpoint, and return the exit status: 0 where nothing is, else 1.

    Args:
        checkpoint: a path or URL.
        threads: how many read and check; None for the usual number.
        as_json: whether to print JSON.

    Raises:
        CheckpointingException: there is no checkpoint, or nothing to check it by.
    """
    began = time.monotonic()
    damage, report = find_damage(checkpoint, threads)
    if as_json:
        record = {
            "checkpoint": checkpoint,
            "sound": not damage,
            "bytes_read": report.bytes_read,
            "bytes_unchecked": report.unchecked_nbytes,
            "damage": [asdict(one) for one in damage],
            "unchecked": [asdict(one) for one in report.unchecked],
        }
        print(json_text(record))
    else:
        amount = f"{size(report.bytes_read)} read {pace(report.bytes_read, time.monotonic() - began)}"
        _show(Output(), checkpoint, report, damage, amount)
    # Bytes without a checksum aren't damage: most formats of other programs have some.
    return 1 if damage else 0


def run_replicas(checkpoint: str, *, as_json: bool) -> int:
    """Print how the copies differ that a checkpoint's files have of one tensor; return 0 where none do, else 1.

    Raises:
        CheckpointingException: there is no checkpoint.
    """
    apart = check_replicas(checkpoint, world=one_process())
    if as_json:
        print(json_text({"checkpoint": checkpoint, "equal": not apart, "differences": [asdict(one) for one in apart]}))
        return 1 if apart else 0
    console = Output()
    for one in apart:
        console.print(Text(printable(str(one))))
    differ = f"copies of {plural(len({one.key for one in apart}), 'tensor')} differ in {checkpoint}"
    show_verdict(console, not apart, differ if apart else f"all copies in {checkpoint} are equal")
    return 1 if apart else 0


def find_damage(checkpoint: str, threads: int | None = None) -> tuple[tuple[Damage, ...], VerifyReport]:
    """Return what is damaged in a checkpoint, and how much was checked, with a bar while it is read.

    Raises:
        CheckpointingException: there is no checkpoint, or nothing to check it by.
    """
    storage = storage_at(checkpoint)
    files, reports = files_in(storage), list[VerifyReport]()
    # The bar is on stderr, so that stdout can be piped; without the length of all files it has no end to show.
    with bar(Output(stderr=True), "verify", files.length if files.is_all else None) as advance:
        damage = verify(storage, options=LoadOptions(threads=threads, progress=advance), report=reports.append)
    return damage, reports[0]


def _show(console: Console, where: str, report: VerifyReport, damage: Sequence[Damage], amount: str) -> None:
    for one in damage:
        # An end of 0: the file is damaged or missing as a whole.
        place = f", bytes {one.begin:,} to {one.end:,}" if one.end else ""
        console.print(Text.assemble((printable(one.file), "bold red"), place))
        for line in (*one.what.split("\n"), *(f"  {key}" for key in shorten(one.holds))):
            console.print(Text(f"    {printable(line)}"))
    files = plural(len({one.file for one in damage}), "file")
    sound = f"no damage found in {where}: {amount}"
    show_verdict(console, not damage, f"{where} is damaged in {files}. {amount}" if damage else sound)
    for line in unchecked_lines(report):
        console.print(Text(f"  {printable(line)}"))


def unchecked_lines(report: VerifyReport) -> Iterator[str]:
    """Yield for how many bytes there is no checksum, by the reason."""
    for why, parts in by_reason(report.unchecked).items():
        amount = f"{size(sum(one.nbytes for one in parts))} in {plural(len(parts), 'file')}"
        yield f"no checksum for {amount}: {why}"
