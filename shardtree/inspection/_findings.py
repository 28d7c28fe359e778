"""The findings of an explanation, collected from one rank after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..core import plans
from ..errors import CheckpointReplaced, CorruptCheckpoint, NotACheckpoint, StorageError
from ..shell.checkpoint.loading import Omissions
from ._explained import RankReads, Undecided


@dataclass(slots=True, eq=False)
class Findings:
    """Findings about all ranks. A finding that several ranks have in common is stored once.

    Attributes:
        failures: Ranks on which a check fails, by class and text of the error.
        problems: Reasons why the ranks' shards and objects can't be loaded.
        unexpected: Problem of each requested key that isn't stored; empty if the strict mode doesn't compare keys.
        omissions: Stored values that the result lacks, and tensors of the target that aren't filled.
        uncompared: Keys of optimizer states that aren't compared with the weights.
        undecided: Failures that depend on stored values, so that metadata can't predict them.
        reads: Predicted reads of each rank whose target could be flattened.
    """

    failures: dict[tuple[type[Exception], str], set[int]] = field(default_factory=dict)
    problems: dict[tuple[object, ...], plans.Misfit] = field(default_factory=dict)
    unexpected: dict[str, plans.Unexpected] = field(default_factory=dict)
    omissions: Omissions = field(default_factory=Omissions)
    uncompared: set[str] = field(default_factory=set)
    undecided: dict[Undecided, None] = field(default_factory=dict)
    reads: list[RankReads] = field(default_factory=list)

    @contextmanager
    def record(self, ranks: Sequence[int], note: str = "") -> Iterator[None]:
        """Record an error of the `with` block as a failure on these ranks, instead of raising it.

        Errors about damaged, replaced or unreachable stored data are still raised.

        Args:
            ranks: Ranks on which the load would raise the error.
            note: Text appended to the error's message.
        """
        try:
            yield
        except (NotACheckpoint, CorruptCheckpoint, CheckpointReplaced, StorageError):
            raise  # the stored data is at fault, not the target: nothing can be explained
        except Exception as error:  # any class: a factory's build function may raise any error, which fails the load
            text = "\n".join([str(error), *getattr(error, "__notes__", ()), *([note] if note else [])])
            self.failures.setdefault((type(error), text), set()).update(ranks)

    def add_problems(self, problems: Iterable[plans.Misfit]) -> None:
        for problem in problems:
            self.problems.setdefault((type(problem), problem.key, getattr(problem, "offset", None)), problem)

    def add_omissions(self, other: Omissions) -> None:
        """Add the omissions of another rank, each path once."""
        own = self.omissions
        self.omissions = Omissions(
            tuple(dict.fromkeys((*own.left_out, *other.left_out))),
            tuple(dict.fromkeys((*own.unfilled, *other.unfilled))),
            tuple(dict.fromkeys((*own.kept, *other.kept))),
            own.union_paths or other.union_paths,
            (*own.unasked_bits, *other.unasked_bits),
        )
