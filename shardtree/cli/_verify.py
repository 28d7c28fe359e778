"""`shardtree verify`: whether every byte of a checkpoint is what was saved."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ..checkpoint import verify
from ..errors import plural, shorten
from ..storage import storage_at
from ..strategies import Damage
from ._bars import bar
from ._files import files_in
from ._output import Output, json_text, printable, spellable
from ._units import pace, size


def run_verify(checkpoint: str, *, as_json: bool) -> int:
    """Print what is damaged in a checkpoint, and return the exit status: 0 where nothing is, else 1.

    Args:
        checkpoint: a path or URL.
        as_json: whether to print JSON.

    Raises:
        CheckpointingException: there is no checkpoint, or nothing to check it by.
    """
    storage, began = storage_at(checkpoint), time.monotonic()
    files, read = files_in(storage), [0]
    with bar(Output(stderr=True), "verify", files.length if files.is_all else None) as advance:

        def count(length: int) -> None:
            read[0] += length
            advance(length)

        damage = verify(storage, progress=count)
    seconds = time.monotonic() - began
    if as_json:
        print(json_text(_document(checkpoint, read[0], damage)))
    else:
        _show(
            Output(),
            checkpoint,
            damage,
            f"{size(read[0])} of data checked {pace(read[0], seconds)}",
        )
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
    place = f", bytes {one.begin:,} to {one.end:,}" if one.end else ""
    console.print(Text.assemble((printable(one.file), "bold red"), place))
    lines = one.what.split("\n")
    for line in (*lines, *(f"  {key}" for key in shorten(one.keys))):
        console.print(Text(f"    {printable(line)}"))


def _document(where: str, read: int, damage: Sequence[Damage]) -> dict[str, object]:
    """Return what docs/command-line.md describes."""
    found = [
        {"file": one.file, "what": one.what, "begin": one.begin, "end": one.end, "keys": one.keys} for one in damage
    ]
    return {"checkpoint": where, "sound": not damage, "bytes_read": read, "damage": found}
