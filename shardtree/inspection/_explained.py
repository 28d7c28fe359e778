"""The predicted outcome of a load: its problems and the reads of each rank, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.deferred import notebook_html
from ..core.layouts import ShapeChange
from ..core.offences import offence_lines, offence_text
from ..core.plans import Gap, Misfit, Mismatch, ReadCost, Refusal, Unexpected, with_prefixes
from ..errors import plural, rank_text, shorten, size_text, table_lines

_HEADINGS = ("rank", "shards", "objects", "asked for", "read", "over-read", "pieces", "files")


@dataclass(frozen=True, slots=True)
class RankReads:
    """The predicted reads of one rank.

    Attributes:
        rank: Number of the rank.
        shards: Number of tensor shards in its target.
        objects: Number of sharded objects in its target.
        cost: Cost of reading the shards that can be loaded; None if the format can't tell.
        sent: Bytes that the rank reads and sends to other ranks.
        received: Bytes that other ranks send to the rank.
    """

    rank: int
    shards: int
    objects: int
    cost: ReadCost | None
    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """A check that fails on some ranks, with the error that `load` would raise there.

    Attributes:
        ranks: Ranks on which the check fails.
        error: Class of the error.
        text: Message of the error.
    """

    fix: ClassVar[str] = ""

    ranks: tuple[int, ...]
    error: type[Exception]
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"

    @property
    def key(self) -> str:
        """The name of the error's class."""
        return self.error.__name__

    @property
    def where(self) -> str:
        """The failing ranks, as a text."""
        return f"({rank_text(self.ranks)})"

    @property
    def what(self) -> str:
        """The error's text."""
        return self.text


@dataclass(frozen=True, slots=True)
class Undecided:
    """A failure that may occur when values are read, and can't be decided from metadata.

    Attributes:
        key: Key of the tensor or object, or name of an argument of `load`.
        why: Question that only values can decide.
    """

    where: ClassVar[str] = ""
    fix: ClassVar[str] = ""

    key: str
    why: str

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The text of `why`."""
        return self.why


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """The predicted outcome of a load, from metadata and the common state alone. Its text is a table.

    Attributes:
        missing: Stored keys that no rank requests, sorted; a problem only in some strict modes.
        problems: Reasons why the target can't be loaded, each once: keys that aren't stored, other global shapes or
            dtypes, incomplete or unreadable tensors, failing checks of the load, and arrays of objects that are stored
            in another shape and have no object rule in `LoadOptions`.
        reads: Predicted reads of each rank, by rank.
        undecided: Failures that depend on stored values, so that metadata can't predict them.
        omitted: Requested keys that aren't stored, if the strict mode leaves them out of the result instead of raising.
        left_out: Paths of stored plain values and containers that a load leaves out of the result.
        unfilled: Paths of the targets' plain tensors that aren't in the result, since nothing is stored for them.
        uncompared: Keys of optimizer states whose masters wouldn't be compared with the weights, since the options have
            ``verify=None``.
        exchange: Reason why ranks would read for each other, or wouldn't, if ``exchange="auto"`` lets the load decide.
        kept: Paths at which the result has the target's own value: nothing is stored there, but the list, tuple or
            class around it needs a value.
    """

    missing: tuple[str, ...]
    problems: tuple[Misfit | FailedCheck, ...]
    reads: tuple[RankReads, ...]
    undecided: tuple[Undecided, ...] = ()
    omitted: tuple[Unexpected, ...] = ()
    left_out: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    exchange: str = ""
    kept: tuple[str, ...] = ()

    @property
    def ok(self) -> bool | None:
        """Whether the load would succeed; None if only values can decide it."""
        if self.problems:
            return False
        return None if self.undecided else True

    @property
    def unexpected(self) -> tuple[Unexpected, ...]:
        """Requested keys that aren't stored, whether the strict mode takes them as a problem or not."""
        return (*(problem for problem in self.problems if isinstance(problem, Unexpected)), *self.omitted)

    @property
    def failed(self) -> tuple[FailedCheck, ...]:
        """Checks of a load that fail."""
        return tuple(problem for problem in self.problems if isinstance(problem, FailedCheck))

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """Tensors that are stored with another global shape or dtype."""
        return tuple(problem for problem in self.problems if isinstance(problem, Mismatch))

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Shards whose elements aren't all stored."""
        return tuple(problem for problem in self.problems if isinstance(problem, Gap))

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Tensors that are stored in a way that can't be read."""
        return tuple(problem for problem in self.problems if isinstance(problem, Refusal))

    @property
    def reshaped(self) -> tuple[ShapeChange, ...]:
        """Arrays of objects that are stored in another shape, and have no object rule in `LoadOptions`."""
        return tuple(problem for problem in self.problems if isinstance(problem, ShapeChange))

    @property
    def cost(self) -> ReadCost | None:
        """Cost of the reads of all ranks together; None if the format can't tell."""
        costs = [one.cost for one in self.reads if one.cost is not None]
        # A total without some ranks would look like a cheap load.
        return sum(costs, ReadCost()) if len(costs) == len(self.reads) else None

    @property
    def over_read(self) -> float | None:
        """Bytes that all ranks read for each requested byte; None if the format can't tell."""
        return None if self.cost is None else self.cost.over_read

    def __repr__(self) -> str:
        counts = f"{plural(len(self.problems), 'problem')}, {plural(len(self.reads), 'rank')}"
        return f"Explanation(ok={self.ok}, {counts})"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __str__(self) -> str:
        misfits = [problem for problem in self.problems if not isinstance(problem, FailedCheck)]
        problems = offence_lines(with_prefixes(misfits))
        lines = [
            _VERDICTS[self.ok],
            *_section([*problems, *map(self._failure_text, self.failed)], "problem", len(self.problems)),
            *_section(map(str, self.undecided), "open question"),
            *_section((f"asked for, not stored, left out: {one.text}" for one in self.omitted), "key"),
            *_section((f"stored, left out: {path}" for path in self.left_out), "place"),
            *_section((f"a plain tensor, not stored: {path}" for path in self.unfilled), "place"),
            *_section((f"the target's own value, not stored: {path}" for path in self.kept), "place"),
            *_section((f"stored, not asked for: {key!r}" for key in self.missing), "key"),
            *_section((f"master not compared with the weight: {key!r}" for key in self.uncompared), "state"),
        ]
        lines += [self.exchange] if self.exchange else []
        over = self.cost is not None and self.cost.bytes_read > self.cost.bytes_wanted
        return "\n".join([*lines, "", *table_lines(_table(self)), *([_OVER_READ] if over else [])])

    def _failure_text(self, check: FailedCheck) -> str:
        return f"{rank_text(check.ranks)}: {check}" if len(check.ranks) < len(self.reads) else str(check)


_OVER_READ = "More is read than asked for: gaps between pieces, and whole blocks, since hashes are checked by block."

_VERDICTS = {
    True: "The target fits the checkpoint.",
    False: "The target does not fit the checkpoint.",
    None: "The target fits the checkpoint, as far as can be told without reading values.",
}


def _section(lines: Iterable[str], noun: str, count: int | None = None) -> list[str]:
    entries = [line.replace("\n", "\n  ") for line in lines]
    heading = f"{plural(len(entries) if count is None else count, noun)}:"
    return [heading, *(f"  {line}" for line in shorten(entries))] if entries else []


def _table(explanation: Explanation) -> list[Sequence[str]]:
    reads = explanation.reads
    rows = [_row(str(rank_reads.rank), rank_reads.shards, rank_reads.objects, rank_reads.cost) for rank_reads in reads]
    traffic = [(rank_reads.sent, rank_reads.received) for rank_reads in reads]
    if len(rows) > 1:
        shards, objects = (sum(getattr(rank_reads, name) for rank_reads in reads) for name in ("shards", "objects"))
        rows.append(_row("all", shards, objects, explanation.cost))
        traffic.append((sum(rank_reads.sent for rank_reads in reads), sum(rank_reads.received for rank_reads in reads)))
    if not any(map(any, traffic)):
        return [_HEADINGS, *rows]
    return [
        (*_HEADINGS, "sent", "received"),
        *((*row, *map(size_text, pair)) for row, pair in zip(rows, traffic, strict=True)),
    ]


def _row(rank: str, shards: int, objects: int, cost: ReadCost | None) -> Sequence[str]:
    counts = (rank, f"{shards:,}", f"{objects:,}")
    if cost is None:
        return (*counts, *("unknown",) * 5)
    sizes = (size_text(cost.bytes_wanted), size_text(cost.bytes_read), f"{cost.over_read:.2f}")
    return (*counts, *sizes, f"{cost.pieces:,}", f"{cost.files:,}")
