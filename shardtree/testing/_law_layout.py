"""The law of a layout: it says of each element who holds it."""

from __future__ import annotations

import torch

from ..layouts import check_access, join_columns, shard_columns
from ._assemble import assemble
from ._bits import first_difference
from ._layout import Layout, cut
from ._tensors import random_bits


def check_layout(layout: Layout) -> None:
    """Raise unless main replicas tile the tensor, and all pieces hold what is at their place.

    Args:
        layout: of a tensor that is small enough to be looked at element by element.

    Raises:
        IntegrityError: an element has no main replica, or several.
        AssertionError: a piece holds something else.

    Examples:
        >>> from shardtree.testing import even_layout
        >>> check_layout(even_layout((4, 6), 3, axis=1))
    """
    whole = random_bits(layout.global_shape, torch.int16, 1)
    trees = [cut(layout, "w", whole, rank) for rank in range(layout.ranks)]
    check_access(join_columns([shard_columns(tree, rank) for rank, tree in enumerate(trees)]))
    differ = first_difference(assemble(trees)["w"], whole)
    assert differ is None, differ
