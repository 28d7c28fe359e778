"""What a removal would do, as a value: it prints as the dry run, and is run as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ...errors import plural
from ...retention import SavedStep
from ._record import FileMark


@dataclass(frozen=True, slots=True)
class StepFiles:
    """What there is of a step that goes.

    Attributes:
        number: the step's.
        folder: its name under the root.
        files: the checkpoint's own, those that make it a checkpoint first.
        others: names in the folder that aren't the checkpoint's, and stay where they are; folders end in ``/``.
    """

    number: int
    folder: str
    files: tuple[FileMark, ...]
    others: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """How many bytes go."""
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Removal:
    """Which steps go, and which stay, and why; printed, it is the dry run.

    Attributes:
        steps: the listing that was decided on, by number.
        kept: by the number of each step that stays, all that keeps it.
        going: the steps that go.

    Examples:
        >>> from shardtree.retention import keep_last, retained
        >>> steps = tuple(SavedStep(number, time=1.8e9) for number in (100, 200))
        >>> going = (StepFiles(100, "step_100", (FileMark("metadata.json", 300, 1.8e9),), ("notes.txt",)),)
        >>> print(Removal(steps, retained(keep_last(1), steps), going))
        step  saved (UTC)
         100  2027-01-15 08:00:00  goes: 300 bytes in 1 file; 1 other file stays
         200  2027-01-15 08:00:00  stays: the newest, keep_last(1)
        1 step goes, 300 bytes; 1 step stays
    """

    steps: tuple[SavedStep, ...]
    kept: Mapping[int, tuple[str, ...]]
    going: tuple[StepFiles, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes go."""
        return sum(step.nbytes for step in self.going)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(removal: Removal) -> Iterator[str]:
    going = {step.number: step for step in removal.going}
    width = max([4, *(len(str(step.number)) for step in removal.steps)])
    yield f"{'step':>{width}}  saved (UTC)"
    for step in removal.steps:
        fate = _goes(going[step.number]) if step.number in going else f"stays: {', '.join(removal.kept[step.number])}"
        yield f"{step.number:>{width}}  {_moment(step.time)}  {fate}"
    gone, stays = len(going), plural(len(removal.steps) - len(going), "step")
    leaves = f"{plural(gone, 'step')} {'goes' if gone == 1 else 'go'}, {removal.nbytes:,} bytes"
    yield f"{leaves}; {stays} {'stays' if stays.startswith('1 ') else 'stay'}"


def _goes(step: StepFiles) -> str:
    text = f"goes: {step.nbytes:,} bytes in {plural(len(step.files), 'file')}"
    count = len(step.others)
    return f"{text}; {plural(count, 'other file')} {'stays' if count == 1 else 'stay'}" if count else text


def _moment(time: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{time!r:>19}"
