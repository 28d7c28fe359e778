"""Every error that shardtree raises, and the common form of error texts.

An error names the operation and its subject, what is wrong, the found and the expected value, and a fix. A path in a
tree is written as the Python expression that reaches it: ``tree['model']['layers'][3]``. Functions here also format
counts, sizes and tables for other texts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import groupby, islice
from typing import Any

__all__ = [
    "AlreadyACheckpoint",
    "CheckpointReplaced",
    "CheckpointingException",
    "CorruptCheckpoint",
    "IntegrityError",
    "KeyMismatch",
    "MetadataError",
    "NotACheckpoint",
    "OutcomeUnknown",
    "RemoteAlreadyACheckpoint",
    "RemoteCheckpointReplaced",
    "RemoteCorruptCheckpoint",
    "RemoteError",
    "RemoteIntegrityError",
    "RemoteKeyMismatch",
    "RemoteMetadataError",
    "RemoteNotACheckpoint",
    "RemoteOutcomeUnknown",
    "RemoteShapeError",
    "RemoteStorageError",
    "RemoteStrategyError",
    "RemoteTraceError",
    "RemoteTreeError",
    "RemoteUnsafeFile",
    "RemoteUnsupportedValue",
    "ShapeError",
    "StorageError",
    "StrategyError",
    "TraceError",
    "TreeError",
    "UnsafeFile",
    "UnsupportedValue",
    "WorldError",
]

TreePath = tuple[Any, ...]

_SHOWN = 10
_LONGEST = 4000  # maximum length of a line in characters, since a name from a file may be as long as the file


class CheckpointingException(Exception):
    """The base class of every error that shardtree raises on purpose."""


class MetadataError(CheckpointingException, ValueError):
    """The description of a leaf contradicts itself."""


class ShapeError(CheckpointingException, ValueError):
    """A shape, offset or dtype doesn't fit."""


class TreeError(CheckpointingException, ValueError):
    """Two trees don't fit together, or a tree contains an unsupported value."""


class KeyMismatch(CheckpointingException, KeyError):
    """Keys are missing or unexpected.

    Attributes:
        missing: All stored keys that no rank requests, sorted; only set by strict modes.
        unexpected: All requested keys that aren't stored, sorted. Strict modes list objects by their keys; other errors
            list objects by their unique keys.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    # KeyError's method shows repr(args[0]), which would quote the message and put it on one line.
    __str__ = Exception.__str__


class IntegrityError(CheckpointingException, ValueError):
    """The ranks' shards don't tile their global tensors: a gap, an overlap or a disagreement."""


class UnsupportedValue(CheckpointingException, TypeError):
    """A format can't hold a value or dtype."""


class TraceError(CheckpointingException, RuntimeError):
    """Traced code reads elements, or a trace can't be evaluated or inverted."""

    # It isn't a TypeError: torch's operators turn a TypeError into NotImplemented, and `a == 0` would be False.


class UnsafeFile(CheckpointingException):
    """Reading a file could run code, and ``allow_pickle=True`` was not passed."""


class StrategyError(CheckpointingException, LookupError):
    """No strategy, or more than one, is registered for an action, backend and version."""


class NotACheckpoint(CheckpointingException, FileNotFoundError):
    """A directory holds no finished checkpoint."""


class AlreadyACheckpoint(CheckpointingException, FileExistsError):
    """A save would replace a checkpoint, and ``overwrite=True`` was not passed."""


class CorruptCheckpoint(CheckpointingException, ValueError):
    """Stored bytes contradict the checkpoint's metadata."""


class CheckpointReplaced(CheckpointingException):
    """A later save replaced an open checkpoint's files."""


class StorageError(CheckpointingException, OSError):
    """A storage refused or aborted a read or a write."""


class OutcomeUnknown(StorageError):
    """No answer came to a request that commits a save. The store may still execute it, so no file was removed."""


class WorldError(CheckpointingException, RuntimeError):
    """Ranks can't reach each other, or call different collectives."""


class RemoteError(WorldError):
    """An operation failed on some rank, and therefore fails on all ranks.

    If the errors of all failing ranks share a subclass of `CheckpointingException` from this module, every rank raises
    the twin of that class (`RemoteNotACheckpoint` for `NotACheckpoint`). The same ``except`` thus works for one rank
    and for many. A twin also has the picklable attributes of the lowest failing rank's error.

    Attributes:
        phase: Name of the phase that failed.
        failures: Error text of each failing rank, by rank.
    """

    # KeyError's method would quote the text, and OSError's would show the errno instead.
    __str__ = Exception.__str__

    def __init__(self, phase: str, failures: dict[int, str]) -> None:
        self.phase = phase
        self.failures = dict(failures)
        ranks: dict[str, list[int]] = {}
        for rank, text in sorted(failures.items()):
            ranks.setdefault(text, []).append(rank)
        # A rank's text may have several lines, which are indented.
        lines = (f"{rank_text(failed)}: {text}".replace("\n", "\n  ") for text, failed in ranks.items())
        super().__init__(error_text(f"{phase}: failed on {plural(len(failures), 'rank')}", offenders=lines))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled by `args`, which here hold the finished text instead of this constructor's arguments.
        return type(self), (self.phase, self.failures), attributes_of(self)


class RemoteMetadataError(RemoteError, MetadataError):
    """The description of a leaf contradicts itself, on some rank."""


class RemoteShapeError(RemoteError, ShapeError):
    """A shape, offset or dtype doesn't fit, on some rank."""


class RemoteTreeError(RemoteError, TreeError):
    """Two trees don't fit together, or a tree contains an unsupported value, on some rank."""


class RemoteKeyMismatch(RemoteError, KeyMismatch):
    """A requested key doesn't exist, on some rank."""


class RemoteIntegrityError(RemoteError, IntegrityError):
    """The ranks' shards don't tile their global tensors, as some rank found."""


class RemoteUnsupportedValue(RemoteError, UnsupportedValue):
    """A format can't hold a value or dtype of some rank."""


class RemoteTraceError(RemoteError, TraceError):
    """A trace can't be evaluated on some rank."""


class RemoteUnsafeFile(RemoteError, UnsafeFile):
    """Reading a file could run code, on some rank."""


class RemoteStrategyError(RemoteError, StrategyError):
    """No strategy, or more than one, is registered for an action, backend and version, on some rank."""


class RemoteNotACheckpoint(RemoteError, NotACheckpoint):
    """A directory holds no finished checkpoint, on some rank."""


class RemoteAlreadyACheckpoint(RemoteError, AlreadyACheckpoint):
    """A save would replace a checkpoint, and ``overwrite=True`` was not passed, on some rank."""


class RemoteCorruptCheckpoint(RemoteError, CorruptCheckpoint):
    """Stored bytes contradict the checkpoint's metadata, on some rank."""


class RemoteCheckpointReplaced(RemoteError, CheckpointReplaced):
    """A later save replaced an open checkpoint's files, as some rank found."""


class RemoteStorageError(RemoteError, StorageError):
    """A storage refused or aborted a read or a write of some rank."""


class RemoteOutcomeUnknown(RemoteError, OutcomeUnknown):
    """No answer came to some rank's request that commits a save; no file was removed."""


# The twin of each class. They are collected here, since a later subclass of RemoteError, a user's, isn't a twin.
REMOTE_TWINS: dict[type[BaseException], type[RemoteError]] = {
    twin.__bases__[1]: twin for twin in RemoteError.__subclasses__()
}


def attributes_of(error: BaseException) -> dict[str, Any]:
    """Return an exception's attributes, including those that an OSError keeps outside of its `__dict__`.

    Examples:
        >>> attributes_of(FileNotFoundError(2, "No such file", "a.bin"))
        {'errno': 2, 'strerror': 'No such file', 'filename': 'a.bin'}
    """
    names = ("errno", "strerror", "filename", "filename2")
    hidden = ((name, getattr(error, name, None)) for name in names if isinstance(error, OSError))
    return vars(error) | {name: value for name, value in hidden if value is not None}


def error_text(
    what: str,
    *,
    found: object = None,
    expected: object = None,
    fix: str | None = None,
    offenders: Iterable[str] = (),
    count: int | None = None,
) -> str:
    r"""Return an error's text in the common form, without characters that could control a terminal.

    Args:
        what: Heading: the operation, its key or path, and what is wrong with it.
        found: Value that was found.
        expected: Value that was expected.
        fix: Instruction to the caller, in the imperative.
        offenders: Descriptions of all faults, one a line; the first ten are shown.
        count: Total number of faults, if `offenders` contains only the first ones.

    Examples:
        >>> error_text("no such file as a\x1b[2J")
        'no such file as a\\x1b[2J'
        >>> print(error_text("load: shape mismatch for 'w'", found=(4, 2), expected=(4, 4), fix="Pass (4, 4)."))
        load: shape mismatch for 'w'
          found (4, 2), expected (4, 4)
          Pass (4, 4).
    """
    facts = ", ".join(
        f"{word} {value}" for word, value in (("found", found), ("expected", expected)) if value is not None
    )
    lines = [what, *shorten(offenders, count=count)]
    lines += [text for text in (facts, fix) if text]
    return "\n".join(map(_bounded, "\n  ".join(lines).split("\n")))


def _bounded(line: str) -> str:
    """Return a line of bounded length without control characters: names may come from untrusted files."""
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ({len(line) - _LONGEST} characters) {line[-_LONGEST // 2 :]}"
    return printable(line)


def printable(text: str) -> str:
    r"""Return text with control characters escaped as in Python, so that it stays on one line.

    Examples:
        >>> printable("a.b ü"), printable("a\x1b[2J\n")
        ('a.b ü', 'a\\x1b[2J\\n')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def shorten(offenders: Iterable[str], shown: int = _SHOWN, count: int | None = None) -> list[str]:
    """Return the first few offenders, then a line that counts the others; `count` is the total number, if known.

    Examples:
        >>> shorten(["a", "b", "c", "d"], shown=2), shorten(["a", "b"], shown=2, count=2**40)
        (['a', 'b', 'and 2 more'], ['a', 'b', 'and 1099511627774 more'])
    """
    remaining = iter(offenders)
    first = list(islice(remaining, shown))
    more = sum(1 for _ in remaining) if count is None else count - len(first)
    return first + ([f"and {more} more"] if more else [])


def missing_numbers(numbers: Container[int], present: int, count: int) -> list[int]:
    """Return the smallest numbers from 0 that `numbers` lacks, for an error: at most ten, all of them below `count`.

    `present` is the number of elements of `numbers` below `count`. A `count` from a file may be huge.

    Examples:
        >>> missing_numbers({0, 2}, 2, 4), missing_numbers({1}, 1, 2**70)[:3]
        ([1, 3], [0, 2, 3])
    """
    absent = (number for number in range(count) if number not in numbers)
    return list(islice(absent, min(_SHOWN, count - present)))


def plural(count: int, noun: str) -> str:
    """Return a count followed by its noun, in the plural if needed.

    Examples:
        >>> plural(1, "rank"), plural(3, "rank")
        ('1 rank', '3 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(count: int) -> str:
    """Return a number of bytes as text with a unit.

    Examples:
        >>> size_text(999), size_text(16_777_216)
        ('999 B', '16.8 MB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def table_lines(rows: Sequence[Sequence[str]], words: int = 0) -> list[str]:
    """Return rows as lines with aligned columns; the first row is the header.

    Args:
        rows: Rows of texts, of equal length.
        words: Number of leading columns that are aligned on the left.

    Examples:
        >>> table_lines([("rank", "sent"), ("0", "7 B")])
        ['rank  sent', '   0   7 B']
    """
    sides = [str.ljust if place < words else str.rjust for place in range(len(rows[0]))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) for row in rows]


def rank_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, with consecutive ranks as a range.

    Examples:
        >>> rank_text([0]), rank_text([0, 1, 4]), rank_text([0, 2, 3, 4, 5])
        ('rank 0', 'ranks 0, 1, 4', 'ranks 0, 2-5')
    """
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs = groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    return "ranks " + ", ".join(text for _, run in runs for text in _run_text([rank for _, rank in run]))


def _run_text(run: list[int]) -> list[str]:
    return [f"{run[0]}-{run[-1]}"] if len(run) > 2 else list(map(str, run))


def render_path(path: TreePath, root: str = "tree") -> str:
    """Return a tree path as the Python expression that reaches the leaf.

    Examples:
        >>> render_path(("model", "layers", 3, "bias"))
        "tree['model']['layers'][3]['bias']"
    """
    return root + "".join(f"[{_entry(entry)}]" for entry in path)


def _entry(entry: object) -> str:
    try:
        return repr(entry)
    except ValueError:  # an integer of more digits than Python converts to text
        return f"a {type(entry).__name__} of very many digits"
