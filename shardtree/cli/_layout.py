"""Tensor-parallel layouts as tables: which axis of each weight is cut between the ranks, and where."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from ..errors import KeyMismatch, error_text
from ..mapping import ShardedTensor


@dataclass(frozen=True, slots=True)
class Rule:
    """How the weights whose name matches a pattern lie on the ranks.

    Attributes:
        pattern: of names, as in a shell.
        axis: which one is cut; None where every rank holds all of it.
        by_head: whether it is cut between attention heads only.
    """

    pattern: str
    axis: int | None = None
    by_head: bool = False


Layout = tuple[Rule, ...]
"""Rules; the first that matches a name counts."""

# As models are trained: a rank has some of the heads, a slice of the MLP's inner units, a part of the vocabulary.
BY_UNITS: Layout = (
    Rule("embeddings.word_embeddings.weight", 0),
    Rule("embeddings.position_*"),
    Rule("embeddings.token_type_embeddings.weight"),
    Rule("*.attention.self.*", 0, by_head=True),
    Rule("*.attention.output.dense.weight", 1, by_head=True),
    Rule("*.intermediate.dense.*", 0),
    Rule("*.output.dense.weight", 1),
    Rule("*.output.dense.bias"),
    Rule("*LayerNorm.*"),
    Rule("pooler.dense.*"),
)

# Every matrix cut along its other axis, that of the hidden state.
BY_HIDDEN: Layout = (
    Rule("embeddings.word_embeddings.weight", 1),
    Rule("embeddings.position_embeddings.weight", 1),
    Rule("embeddings.position_ids"),
    Rule("embeddings.token_type_embeddings.weight", 1),
    Rule("*.attention.self.*.weight", 1),
    Rule("*.attention.self.*.bias"),
    Rule("*.intermediate.dense.weight", 1),
    Rule("*.intermediate.dense.bias"),
    Rule("*.output.dense.*", 0),
    Rule("*LayerNorm.*"),
    Rule("pooler.dense.weight", 1),
    Rule("pooler.dense.bias"),
)


def rule_for(layout: Layout, name: str) -> Rule:
    """Return the first rule that matches a name.

    Raises:
        KeyMismatch: none does.

    Examples:
        >>> rule_for(BY_UNITS, "encoder.layer.3.output.dense.weight").axis
        1
    """
    for rule in layout:
        if fnmatchcase(name, rule.pattern):
            return rule
    raise KeyMismatch(error_text(f"layout: no rule for {name!r}", fix="Add a rule that says which axis is cut."))


def cuts(size: int, count: int, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each of `count` pieces, as equal as whole units allow, larger ones first.

    Examples:
        >>> cuts(10, 4), cuts(12, 4, unit=4)
        (((0, 3), (3, 6), (6, 8), (8, 10)), ((0, 4), (4, 8), (8, 12), (12, 12)))
    """
    each, more = divmod(size // unit, count)
    starts = [unit * (piece * each + min(piece, more)) for piece in range(count)]
    return tuple(zip(starts, [*starts[1:], size], strict=True))


def piece(name: str, whole: Tensor, rule: Rule, rank: int, count: int, *, head_size: int = 1) -> ShardedTensor:
    """Return a rank's shard of a weight; its data is a view of the whole.

    Args:
        name: the weight's, and the shard's key.
        whole: the global tensor.
        rule: how it is cut.
        rank: which piece.
        count: how many ranks there are.
        head_size: indices that belong to one attention head.

    Examples:
        >>> import torch
        >>> piece("w", torch.zeros(10, 2), Rule("*", 0), 3, 4).global_slice()
        (slice(8, 10, None), slice(0, 2, None))
    """
    axis = rule.axis
    if axis is None:
        return ShardedTensor.from_rank_offsets(name, whole, replica_id=rank)
    places = cuts(whole.shape[axis], count, head_size if rule.by_head else 1)
    start, stop = places[rank]
    data = whole.narrow(axis, start, stop - start)
    if len({last - first for first, last in places}) == 1:
        return ShardedTensor.from_rank_offsets(name, data, (axis, rank, count))
    offset = tuple(start if other == axis else 0 for other in range(whole.dim()))
    return ShardedTensor(name, data, whole.dtype, tuple(data.shape), tuple(whole.shape), offset, None)
