"""`shardtree verify`: the comparison of a checkpoint's bytes with their checksums."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from ..errors import StrategyError, error_text, plural, shorten
from ..inspection import check_replicas, verify
from ..shell.storage import storage_at
from ..shell.table import LoadOptions, VerifyReport, by_reason
from ..shell.world import one_process
from ._command import TROUBLE, complain
from ._files import files_in
from ._output import Output, bar, json_text, pace, printable, show_verdict, size


def run_verify(checkpoint: str, *, threads: int | None, needs_checksums: bool, as_json: bool) -> int:
    """Print the damage of a checkpoint, and return the exit status: 0 if there is none, else 1.

    Args:
        checkpoint: Path or URL of the checkpoint.
        threads: Number of threads that read and check; None for the default.
        needs_checksums: True to return 2 if nothing is damaged but bytes have no checksum.
        as_json: True to print JSON.

    Raises:
        CheckpointingException: There is no checkpoint, or its format has no checks.
    """
    began = time.monotonic()
    report = find_damage(checkpoint, threads)
    if as_json:
        record = {
            "checkpoint": checkpoint,
            "sound": report.sound,
            "bytes_read": report.bytes_read,
            "bytes_checked": report.bytes_checked,
            "bytes_unchecked": report.unchecked_nbytes,
            "damage": [asdict(damage) for damage in report.damage],
            "unchecked": [asdict(unchecked) for unchecked in report.unchecked],
        }
        print(json_text(record))
    else:
        _show(Output(), checkpoint, report, pace(report.bytes_read, time.monotonic() - began))
    if report.sound is None and needs_checksums:
        heading = "verify: some bytes have no checksum"
        fix = "Leave out --require-checksums to accept them; most other programs do not store checksums of all bytes."
        amount = f"{size(report.unchecked_nbytes)} of {checkpoint}"
        complain("verify", StrategyError(error_text(heading, found=amount, expected="none", fix=fix)))
        return TROUBLE
    # Bytes without a checksum aren't damage, since most formats of other programs have some.
    return 0 if report.sound is not False else 1


def run_replicas(checkpoint: str, *, as_json: bool) -> int:
    """Print the tensors whose copies in several files differ, and return the exit status: 0 if there are none, else 1.

    Raises:
        CheckpointingException: There is no checkpoint.
    """
    apart = check_replicas(checkpoint, world=one_process())
    if as_json:
        differences = [asdict(difference) for difference in apart]
        print(json_text({"checkpoint": checkpoint, "equal": not apart, "differences": differences}))
        return 1 if apart else 0
    console = Output()
    for difference in apart:
        console.print(Text(printable(str(difference))))
    keys = {difference.key for difference in apart}
    differ = f"copies of {plural(len(keys), 'tensor')} differ in {checkpoint}"
    show_verdict(console, not apart, differ if apart else f"all copies in {checkpoint} are equal")
    return 1 if apart else 0


def find_damage(checkpoint: str, threads: int | None = None) -> VerifyReport:
    """Return the damage of a checkpoint and the number of bytes checked, and show a bar while it is read.

    Raises:
        CheckpointingException: There is no checkpoint, or its format has no checks.
    """
    storage = storage_at(checkpoint)
    files, reports = files_in(storage), list[VerifyReport]()
    # The bar is on stderr, so that stdout can be piped. Its total needs the length of all files.
    with bar(Output(stderr=True), "verify", files.length if files.is_all else None) as advance:
        verify(storage, options=LoadOptions(threads=threads, progress=advance), report=reports.append)
    return reports[0]


def verdict(where: str, report: VerifyReport) -> str:
    """Return a sentence about the result of a check.

    Examples:
        >>> from shardtree.strategies import Unchecked
        >>> verdict("step-1", VerifyReport(9, (), 9))
        'no damage found in step-1: 9 B read'
        >>> verdict("step-1", VerifyReport(9, (Unchecked("f", "no checksum", 7),), 2))
        'step-1 is checked in part: 2 B without damage, 7 B without a checksum'
        >>> verdict("step-1", VerifyReport(0, (Unchecked("f", "no checksum", 7),)))
        'step-1 is unchecked: its 7 B have no checksum'
    """
    if report.damage:
        return f"{where} is damaged in {plural(len({damage.file for damage in report.damage}), 'file')}"
    checked, unchecked = size(report.bytes_checked), size(report.unchecked_nbytes)
    if report.sound:
        return f"no damage found in {where}: {size(report.bytes_read)} read"
    if report.bytes_checked:
        return f"{where} is checked in part: {checked} without damage, {unchecked} without a checksum"
    return f"{where} is unchecked: its {unchecked} have no checksum"


def _show(console: Console, where: str, report: VerifyReport, pace: str) -> None:
    for damage in report.damage:
        # An end of 0 means that the file is damaged or missing as a whole.
        place = f", bytes {damage.begin:,} to {damage.end:,}" if damage.end else ""
        console.print(Text.assemble((printable(damage.file), "bold red"), place))
        for line in (*damage.what.split("\n"), *(f"  {key}" for key in shorten(damage.holds))):
            console.print(Text(f"    {printable(line)}"))
    read = "" if report.sound else f". {size(report.bytes_read)} read"
    show_verdict(console, report.sound, f"{verdict(where, report)}{read} {pace}")
    for line in unchecked_lines(report):
        console.print(Text(f"  {printable(line)}"))


def unchecked_lines(report: VerifyReport) -> Iterator[str]:
    """Yield a line with the number of bytes without a checksum, for each reason."""
    for why, parts in by_reason(report.unchecked).items():
        amount = f"{size(sum(part.nbytes for part in parts))} in {plural(len(parts), 'file')}"
        yield f"no checksum for {amount}: {why}"
