"""Whole sharded trees of all ranks, together with what they are trees of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from ._layout import Layout
from ._pretty import pretty_repr
from ._states import GlobalState, global_states, rank_tree, state_layouts, target_tree


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTrees:
    """The trees that all ranks hold of one state: what a function of trees is tried on, and what it must come to.

    Attributes:
        state: the global values, the oracle.
        layout: for each tensor's key, how it lies over the ranks.
        trees: each rank's, by rank.
    """

    state: GlobalState
    layout: Mapping[str, Layout]
    trees: tuple[Any, ...]

    @property
    def targets(self) -> tuple[Any, ...]:
        """What each rank would ask for: its tree without data."""
        return tuple(target_tree(self.state, self.layout, rank) for rank in range(len(self.trees)))

    _repr_pretty_ = pretty_repr

    def __repr__(self) -> str:
        """Return the state and its layout, of which the trees are made."""
        return f"ShardedTrees({self.state}, {dict(self.layout)})"


@st.composite
def sharded_trees(
    draw: st.DrawFn, *, ranks: int | None = None, state: st.SearchStrategy[GlobalState] | None = None
) -> ShardedTrees:
    """Return a strategy for all ranks' trees of a state, in layouts of every kind, with the state itself.

    Args:
        draw: Hypothesis's own.
        ranks: how many there are; 1 to 4 by default.
        state: a strategy for the state; tensors of any shape and dtype, objects and a common state by default.

    Examples:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3)
        ... @given(sharded_trees(ranks=2))
        ... def check_a_tree_a_rank(drawn):
        ...     assert len(drawn.trees) == 2
        >>> check_a_tree_a_rank()
    """
    drawn = draw(global_states() if state is None else state)
    count = draw(st.integers(1, 4)) if ranks is None else ranks
    layout = draw(state_layouts(drawn, count))
    return ShardedTrees(drawn, layout, tuple(rank_tree(drawn, layout, rank) for rank in range(count)))
