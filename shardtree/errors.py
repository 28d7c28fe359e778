"""Every error that shardtree raises, and the form of their texts.

An error says what was being done, on what, what was found, what was expected and what to do. A place in a tree is
written as the Python expression that reaches it: ``tree['model']['layers'][3]``. Counts, sizes and tables are written
here for all other texts too.
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
_LONGEST = 4000  # characters of a line: a guard, since a name from a file may be as long as the file


class CheckpointingException(Exception):
    """The base of every error that shardtree raises on purpose."""


class MetadataError(CheckpointingException, ValueError):
    """A leaf was described in a way that contradicts itself."""


class ShapeError(CheckpointingException, ValueError):
    """A shape, offset or dtype doesn't fit its place."""


class TreeError(CheckpointingException, ValueError):
    """Two trees don't fit together, or a tree has something that it can't contain."""


class KeyMismatch(CheckpointingException, KeyError):
    """A key was requested that doesn't exist.

    Attributes:
        missing: all keys that are stored and requested by no rank, sorted, where a strict mode of `load` raises them.
        unexpected: all keys that `load` was asked for and that aren't stored, sorted; unless a strict mode found them,
            unique keys of objects.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    # KeyError shows repr(args[0]), which would quote the message and put it on one line.
    __str__ = Exception.__str__


class IntegrityError(CheckpointingException, ValueError):
    """The ranks' shards don't tile their global tensors: a gap, an overlap or a disagreement."""


class UnsupportedValue(CheckpointingException, TypeError):
    """A value or dtype that a format can't hold."""


class TraceError(CheckpointingException, RuntimeError):
    """Code that is traced asks for elements, or a trace can't be evaluated or inverted."""

    # Not a TypeError: Python's operators take that for "ask the other operand", and `a == 0` would be False.


class UnsafeFile(CheckpointingException):
    """A file would run code when read, and ``allow_pickle=True`` was not given."""


class StrategyError(CheckpointingException, LookupError):
    """No strategy, or more than one, is registered for an action, backend and version."""


class NotACheckpoint(CheckpointingException, FileNotFoundError):
    """A directory holds no finished checkpoint."""


class AlreadyACheckpoint(CheckpointingException, FileExistsError):
    """A save would replace a checkpoint and ``overwrite=True`` was not given."""


class CorruptCheckpoint(CheckpointingException, ValueError):
    """Stored bytes aren't what the checkpoint's metadata says."""


class CheckpointReplaced(CheckpointingException):
    """An open checkpoint's files were replaced by a later save."""


class StorageError(CheckpointingException, OSError):
    """Storage refused or aborted a read or a write."""


class OutcomeUnknown(StorageError):
    """No answer came to the request that commits a save, and the store may still take it: nothing was removed."""


class WorldError(CheckpointingException, RuntimeError):
    """Ranks can't reach each other, or called different collectives."""


class RemoteError(WorldError):
    """Something failed on some rank, so that no rank goes on.

    Where all failing ranks' errors share a class of this module below `CheckpointingException`, every rank raises that
    class's twin (`RemoteNotACheckpoint` for `NotACheckpoint`), so that one ``except`` works for one rank and for many.
    A twin also has the attributes of the lowest failing rank's error, as far as they can be pickled.

    Attributes:
        phase: what the ranks were doing.
        failures: rank -> what went wrong there.
    """

    # Not KeyError's, which quotes the text, nor OSError's, which shows the errno instead.
    __str__ = Exception.__str__

    def __init__(self, phase: str, failures: dict[int, str]) -> None:
        self.phase = phase
        self.failures = dict(failures)
        ranks: dict[str, list[int]] = {}
        for rank, text in sorted(failures.items()):
            ranks.setdefault(text, []).append(rank)
        # A rank's text may have several lines, which are indented.
        lines = (f"{rank_text(own)}: {text}".replace("\n", "\n  ") for text, own in ranks.items())
        super().__init__(error_text(f"{phase}: failed on {plural(len(failures), 'rank')}", offenders=lines))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by `args`, which hold the finished text here, and not this constructor's arguments.
        return type(self), (self.phase, self.failures), attributes_of(self)


class RemoteMetadataError(RemoteError, MetadataError):
    """A leaf was described in a way that contradicts itself, on some rank."""


class RemoteShapeError(RemoteError, ShapeError):
    """A shape, offset or dtype didn't fit its place, on some rank."""


class RemoteTreeError(RemoteError, TreeError):
    """Two trees didn't fit together, or a tree had something that it can't contain, on some rank."""


class RemoteKeyMismatch(RemoteError, KeyMismatch):
    """A key was requested that doesn't exist, on some rank."""


class RemoteIntegrityError(RemoteError, IntegrityError):
    """Some rank found that the shards don't tile their global tensors."""


class RemoteUnsupportedValue(RemoteError, UnsupportedValue):
    """Some rank had a value or dtype that a format can't hold."""


class RemoteTraceError(RemoteError, TraceError):
    """A trace can't be evaluated on some rank."""


class RemoteUnsafeFile(RemoteError, UnsafeFile):
    """Some rank met a file that would run code when read."""


class RemoteStrategyError(RemoteError, StrategyError):
    """Some rank found no strategy, or more than one."""


class RemoteNotACheckpoint(RemoteError, NotACheckpoint):
    """Some rank found no finished checkpoint."""


class RemoteAlreadyACheckpoint(RemoteError, AlreadyACheckpoint):
    """Some rank found a checkpoint that a save would replace."""


class RemoteCorruptCheckpoint(RemoteError, CorruptCheckpoint):
    """Some rank read bytes that aren't what the checkpoint's metadata says."""


class RemoteCheckpointReplaced(RemoteError, CheckpointReplaced):
    """Some rank found that a later save has replaced an open checkpoint's files."""


class RemoteStorageError(RemoteError, StorageError):
    """Storage refused or aborted some rank's read or write."""


class RemoteOutcomeUnknown(RemoteError, OutcomeUnknown):
    """No answer came to some rank's request that commits a save: nothing was removed."""


# Each class's twin. Collected now, since a user's later subclass of RemoteError isn't one.
REMOTE_TWINS: dict[type[BaseException], type[RemoteError]] = {
    twin.__bases__[1]: twin for twin in RemoteError.__subclasses__()
}


def attributes_of(error: BaseException) -> dict[str, Any]:
    """Return an exception's attributes, and those that an OSError doesn't keep in its `__dict__`.

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
    r"""Return an error's text in the common form, without characters that would control a terminal.

    Args:
        what: what was being done, on which key or path, and what is wrong.
        found: what was there.
        expected: what should have been there.
        fix: what the caller can do about it.
        offenders: every place that is wrong; the first ten are shown.
        count: number of all places that are wrong, where `offenders` has the first ones alone.

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
    r"""Return text with control characters escaped as in Python: it stays on one line, and can't steer a terminal.

    Examples:
        >>> printable("a.b ü"), printable("a\x1b[2J\n")
        ('a.b ü', 'a\\x1b[2J\\n')
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def shorten(offenders: Iterable[str], shown: int = _SHOWN, count: int | None = None) -> list[str]:
    """Return the first few offenders, and how many more there are: of so many in all, or as many as are given.

    Examples:
        >>> shorten(["a", "b", "c", "d"], shown=2), shorten(["a", "b"], shown=2, count=2**40)
        (['a', 'b', 'and 2 more'], ['a', 'b', 'and 1099511627774 more'])
    """
    rest = iter(offenders)
    first = list(islice(rest, shown))
    more = sum(1 for _ in rest) if count is None else count - len(first)
    return first + ([f"and {more} more"] if more else [])


def missing_numbers(numbers: Container[int], present: int, count: int) -> list[int]:
    """Return the first few numbers below a count that aren't there, as many as an error names.

    The count may come from a file, which may claim any; `present` of the given numbers are below it.

    Examples:
        >>> missing_numbers({0, 2}, 2, 4), missing_numbers({1}, 1, 2**70)[:3]
        ([1, 3], [0, 2, 3])
    """
    absent = (number for number in range(count) if number not in numbers)
    return list(islice(absent, min(_SHOWN, count - present)))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    Examples:
        >>> plural(1, "rank"), plural(3, "rank")
        ('1 rank', '3 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(count: int) -> str:
    """Return a number of bytes in words.

    Examples:
        >>> size_text(999), size_text(16_777_216)
        ('999 B', '16.8 MB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def table_lines(rows: Sequence[Sequence[str]], words: int = 0) -> list[str]:
    """Return rows as lines with aligned columns; the first row is the heading.

    Args:
        rows: texts, as many in each.
        words: how many columns, the first ones, are aligned on the left.

    Examples:
        >>> table_lines([("rank", "sent"), ("0", "7 B")])
        ['rank  sent', '   0   7 B']
    """
    sides = [str.ljust if place < words else str.rjust for place in range(len(rows[0]))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) for row in rows]


def rank_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, consecutive ones as a range.

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
