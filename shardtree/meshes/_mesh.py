"""Mesh: ranks in a grid with named axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Never

import numpy as np

from ..core.deferred import notebook_html
from ..core.geometry import integer, refuse
from ..errors import MetadataError, error_text, plural


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mesh:
    """Ranks in a row-major grid with named axes: along the last axis, neighbours are consecutive ranks.

    Args:
        axes: Size of each axis by its name, outermost first.

    Attributes:
        axes: Pairs (name, size), one for each axis.
        ranks: Ranks of the grid in row-major order; 0, 1, 2 ... unless set by `on_ranks`.

    Raises:
        MetadataError: A size isn't an integer of at least 1, or has no name.

    Examples:
        >>> mesh = Mesh(dp=2, tp=4)
        >>> mesh.size, mesh.coordinates(5), mesh.rank_at(dp=1, tp=1)
        (8, {'dp': 1, 'tp': 1}, 5)
        >>> Mesh(tp=2).on_ranks([6, 7]).coordinates(7)
        {'tp': 1}
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __init__(self, /, *sizes_alone: Never, **axes: int) -> None:
        # JAX and torch take sizes, then names. Such arguments are accepted only to show the right call in the error.
        if sizes_alone:
            found, expected = f"{plural(len(sizes_alone), 'argument')} without a name", "the size of each axis by name"
            fix = f"Write {_by_name(sizes_alone)}; `on_ranks` sets other ranks."
            refuse("Mesh", "axes", found, expected, fix, error=MetadataError)
        sizes = tuple((name, integer("Mesh", name, size)) for name, size in axes.items())
        for name, size in sizes:
            if size < 1:
                refuse("Mesh", name, size, "at least 1", "Leave out axes that are not used.", error=MetadataError)
        object.__setattr__(self, "axes", sizes)
        object.__setattr__(self, "ranks", tuple(range(prod(size for _, size in sizes))))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.axes)
        if self.ranks == tuple(range(self.size)):
            return f"Mesh({sizes})"
        are_consecutive = all(right == left + 1 for left, right in pairwise(self.ranks))
        ranks = f"range({self.ranks[0]}, {self.ranks[-1] + 1})" if are_consecutive else str(self.ranks)
        return f"Mesh({sizes}).on_ranks({ranks})"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, by name."""
        return dict(self.axes)

    def on_ranks(self, ranks: Iterable[int]) -> Mesh:
        """Return a mesh of the same axes with other ranks.

        Args:
            ranks: Ranks of the grid in row-major order, each once.

        Raises:
            MetadataError: The number of ranks isn't the mesh's size, a rank occurs twice, or a rank is negative.

        Examples:
            >>> Mesh(tp=2, dp=2).on_ranks(range(4, 8)).rank_at(tp=1, dp=0)
            6
        """
        if not isinstance(ranks, Iterable):
            fix = "Pass all ranks in row-major order, such as range(4, 8)."
            refuse(repr(self), "ranks", type(ranks).__name__, f"{self.size} ranks", fix, error=MetadataError)
        # Converted, since ranks often come from NumPy, whose integers print and pickle differently.
        ranks = tuple(integer("Mesh", f"ranks[{place}]", rank) for place, rank in enumerate(ranks))
        if len(ranks) != self.size or len(set(ranks)) != self.size or min(ranks) < 0:
            expected, fix = f"{self.size} different ranks, none negative", "Pass each rank once, in row-major order."
            raise MetadataError(error_text(f"{self!r}: ranks do not fit", found=ranks, expected=expected, fix=fix))
        mesh = Mesh(**self.shape)
        object.__setattr__(mesh, "ranks", ranks)
        return mesh

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each axis.

        Raises:
            MetadataError: The rank isn't on the mesh.
        """
        rank = integer(repr(self), "rank", rank)
        if rank not in self.ranks:
            refuse(repr(self), "rank", rank, "a rank of the mesh", "Pass one of Mesh.ranks.", error=MetadataError)
        sizes = [size for _, size in self.axes]
        place = np.unravel_index(self.ranks.index(rank), sizes) if sizes else ()
        return {name: int(index) for (name, _), index in zip(self.axes, place, strict=True)}

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank with the given index along each axis.

        Raises:
            MetadataError: An axis is missing or unknown, or an index is out of range.
        """
        for name, index in coordinates.items():
            if not 0 <= integer(repr(self), name, index) < self.shape.get(name, 0):
                fix = "Give an index for each axis, from 0 to its size."
                refuse(repr(self), name, index, "an index along an axis of the mesh", fix, error=MetadataError)
        if coordinates.keys() != self.shape.keys():
            expected, fix = ", ".join(self.shape), "Give an index for each axis."
            refuse(repr(self), "coordinates", ", ".join(coordinates), expected, fix, error=MetadataError)
        place = np.ravel_multi_index([coordinates[name] for name in self.shape], [*self.shape.values()])
        return self.ranks[int(place)]


def check_mesh(mesh: Any) -> None:
    """Raise MetadataError unless a value is a mesh.

    Examples:
        >>> check_mesh(Mesh(tp=2))
    """
    if not isinstance(mesh, Mesh):
        heading = "the argument `mesh` is not a mesh"
        fix = "Pass a Mesh as mesh=, for example Mesh(dp=2, tp=4); `mesh_of` converts a DeviceMesh."
        raise MetadataError(error_text(heading, found=type(mesh).__name__, expected="a Mesh", fix=fix))


def _by_name(sizes: tuple[Any, ...]) -> str:
    """Return the call to suggest to a user who passed arguments as JAX and torch take them: sizes, then names.

    Examples:
        >>> _by_name(((2, 4), ("dp", "tp"))), _by_name((8,))
        ('Mesh(dp=2, tp=4)', 'Mesh(dp=2, tp=4), say')
    """
    rows = [tuple(part) if isinstance(part, Sequence) else () for part in sizes[-2:]]
    if len(rows) == 2 and rows[0] and len(rows[0]) == len(rows[1]) and all(map(str.isidentifier, map(str, rows[1]))):
        return f"Mesh({', '.join(f'{name}={size}' for size, name in zip(*rows, strict=True))})"
    return "Mesh(dp=2, tp=4), say"
