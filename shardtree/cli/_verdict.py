"""What was found out about the loaded state: each statement, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import shorten
from ._ranks import Embeddings
from ._state import GROUPS, Comparison


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about the loaded state.

    Attributes:
        holds: whether it is true.
        text: the statement, with what was counted.
        details: what it was counted of, or what is wrong.
    """

    holds: bool
    text: str
    details: tuple[str, ...] = ()


def verdict(
    elements: Mapping[str, int], comparisons: Sequence[Comparison], embeddings: Embeddings | None
) -> tuple[Finding, ...]:
    """Return what holds of a loaded state.

    Args:
        elements: how many there are of each group in all.
        comparisons: every rank's.
        embeddings: rank 0's.
    """
    return (
        *(_group_finding(group, elements[group], comparisons) for group in GROUPS),
        _replicas_finding(comparisons),
        _common_finding(comparisons),
        _embeddings_finding(embeddings),
    )


def _group_finding(group: str, elements: int, comparisons: Sequence[Comparison]) -> Finding:
    same = sum(comparison.own[group] for comparison in comparisons)
    return Finding(same == elements, f"{group}: {same:,} of {elements:,} elements are the same, bit for bit")


def _replicas_finding(comparisons: Sequence[Comparison]) -> Finding:
    different = sorted({key for comparison in comparisons for key in comparison.different})
    compared = sum(sum(comparison.same.values()) for comparison in comparisons)
    if different:
        return Finding(False, f"{len(different)} tensors differ on some rank", tuple(shorten(different)))
    return Finding(True, f"replicas included, {compared:,} elements were compared, none differs")


def _common_finding(comparisons: Sequence[Comparison]) -> Finding:
    places = sorted({place for comparison in comparisons for place in comparison.different_common})
    return Finding(not places, "step and param_groups are the same on every rank", tuple(shorten(places)))


def _embeddings_finding(embeddings: Embeddings | None) -> Finding:
    text = "the encoder run with the reloaded weights gives the same output, bit for bit"
    return Finding(embeddings is not None and embeddings.are_equal, text)
