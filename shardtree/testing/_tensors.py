"""Strategies for dtypes, shapes and tensors of random bits, and for meshes and partition specs that fit them."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from ..core.trees import empty_data
from ..meshes import AxisSplit, Mesh, PartitionSpec, SpecEntry

# Dtypes are all those of the installed torch, so that a new release's dtypes are tested without a change here.

_WITH_SCALES = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}

STORABLE_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted(
        {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        - {getattr(torch, name) for name in _WITH_SCALES if hasattr(torch, name)},
        key=str,
    )
)
"""All dtypes of the installed torch except quantised ones, whose values depend on a scale beside their bits."""


PRINTABLE_DTYPES: tuple[torch.dtype, ...] = tuple(
    dtype for dtype in STORABLE_DTYPES if not re.fullmatch(r"torch\.(u?int[1-7]|bits\w+|float4\w+)", str(dtype))
)
"""Dtypes whose tensors torch can print, as Hypothesis does for a failing example."""


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Return a strategy for dtypes that can be stored; it shrinks to float32.

    Examples:
        >>> import torch
        >>> torch.bfloat16 in STORABLE_DTYPES, torch.qint8 in STORABLE_DTYPES
        (True, False)
    """
    first = torch.float32
    return st.sampled_from([first, *(dtype for dtype in STORABLE_DTYPES if dtype != first)])


# Shapes and tensors.

_SIZES = (1, 2, 3, 4, 6, 8, 5, 7, 12, 0)


def shapes(*, max_axes: int = 4, sizes: tuple[int, ...] = _SIZES) -> st.SearchStrategy[tuple[int, ...]]:
    """Return a strategy for global shapes, scalars and shapes without elements included.

    Args:
        max_axes: Upper bound on the number of axes.
        sizes: Sizes of an axis to draw from; the strategy shrinks to the first one.

    Examples:
        >>> from hypothesis import find
        >>> find(shapes(), lambda shape: len(shape) == 2 and 0 not in shape)
        (1, 1)
    """
    return st.lists(st.sampled_from(sizes), max_size=max_axes).map(tuple)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits, the same for the same arguments; a quarter of floats are NaNs with payloads.

    Args:
        shape: Shape of the tensor.
        dtype: Any dtype that isn't quantised.
        seed: Seed of the random bits; with 0 the bytes count up instead, so that a failure is easy to read.

    Examples:
        >>> random_bits((2, 2), torch.int16)
        tensor([[ 256,  770],
                [1284, 1798]], dtype=torch.int16)
        >>> random_bits((1000,), torch.float64, seed=1).isnan().any()
        tensor(True)
    """
    _trigger_warnings(dtype)
    length = math.prod(shape) * dtype.itemsize
    generator = np.random.default_rng(seed)
    if seed:
        raw = np.frombuffer(generator.bytes(length), dtype=np.uint8).copy()
    else:
        raw = np.resize(np.arange(256, dtype=np.uint8), length)
    if dtype == torch.bool:
        raw &= 1  # a bool with another byte is undefined behaviour
    elif seed and dtype.is_floating_point:
        high = raw.reshape(-1, dtype.itemsize)
        high[generator.random(len(high)) < 0.25, -2:] |= np.array([0xF0, 0x7F], dtype=np.uint8)[-dtype.itemsize :]
    # Some dtypes refuse a view of no elements.
    return torch.from_numpy(raw).view(dtype).view(shape) if length else empty_data(shape, dtype, "cpu")


@cache
def _trigger_warnings(dtype: torch.dtype) -> None:
    """Trigger torch's warning about a dtype, which appears once in each process, so that no test shows it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.empty(0, dtype=dtype, device="cpu")


def tensors(
    shape: st.SearchStrategy[tuple[int, ...]] | None = None,
    *,
    dtype: st.SearchStrategy[torch.dtype] | torch.dtype | None = None,
) -> st.SearchStrategy[torch.Tensor]:
    """Return a strategy for contiguous CPU tensors of any storable dtype, NaN payloads included.

    Args:
        shape: Strategy for shapes; any shape by default.
        dtype: A dtype, or a strategy for dtypes; by default all that can be stored, although torch can't print some.

    Examples:
        >>> from hypothesis import find
        >>> find(tensors(dtype=torch.int8), lambda tensor: tensor.numel() > 1)
        tensor([0, 1], dtype=torch.int8)
    """
    kinds = st.just(dtype) if isinstance(dtype, torch.dtype) else dtypes() if dtype is None else dtype
    sizes = shapes() if shape is None else shape
    return st.builds(random_bits, sizes, kinds, st.integers(0, 2**16))


# Meshes and specs.

_MESH_AXES = ("dp", "tp", "pp", "cp", "ep")
_MESH_SIZES = (2, 1, 3, 4)


@st.composite
def meshes(draw: st.DrawFn, *, max_ranks: int = 8, max_axes: int = 3, simple: bool = False) -> Mesh:
    """Return a strategy for meshes; it shrinks to one axis of one rank.

    Ranks may be in any order, and begin at any number.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        max_ranks: Upper bound on the number of ranks.
        max_axes: Upper bound on the number of axes, up to five.
        simple: Whether ranks count up from 0.

    Examples:
        >>> from hypothesis import find
        >>> find(meshes(), lambda mesh: mesh.shape.get("tp", 0) > 1).shape
        {'tp': 2}
    """
    sizes: dict[str, int] = {}
    size = 1
    for name in draw(st.lists(st.sampled_from(_MESH_AXES), min_size=1, max_size=max_axes, unique=True)):
        fitting = [length for length in sorted(_MESH_SIZES) if size * length <= max_ranks]
        sizes[name] = draw(st.sampled_from(fitting))
        size *= sizes[name]
    mesh = Mesh(**sizes)
    if simple:
        return mesh
    # A mesh of some of a job's ranks, such as one stage of a pipeline, doesn't begin with rank 0.
    first = draw(st.sampled_from([0, 0, size, 3]))
    ranks = list(range(first, first + size))
    return mesh.on_ranks(draw(st.just(ranks) | st.permutations(ranks)))


@st.composite
def partition_specs(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh, *, simple: bool = False) -> PartitionSpec:
    """Return a strategy for specs that fit a tensor and a mesh; it shrinks to one that cuts nothing.

    No, one or several mesh axes may cut a tensor axis. Its entry in the spec is None, or a tuple of names or of
    `AxisSplit`. Its size need not be a multiple of the number of parts. With `at`, a spec puts the tensor on only some
    of the ranks.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        shape: Shape of the tensor.
        mesh: Mesh of the ranks.
        simple: Whether each axis is cut by at most one mesh axis, into equal parts, on all ranks.

    Examples:
        >>> from hypothesis import find
        >>> find(partition_specs((5, 3), Mesh(dp=2, tp=2)), lambda spec: spec.axes == ("tp",))
        PartitionSpec('tp', None)
    """
    if simple:
        entries: list[SpecEntry] = []
        unused = dict(mesh.shape)
        for size in shape:
            fitting = [name for name, parts in unused.items() if size % parts == 0]
            entries.append(draw(st.sampled_from([None, *fitting])))
            unused.pop(str(entries[-1]), None)
        return PartitionSpec(*entries)
    cuts: list[list[str]] = [[] for _ in shape]
    at: dict[str, int] = {}
    for name in draw(st.permutations(list(mesh.shape))):
        use = draw(st.sampled_from(["replicate", *range(len(shape)), "at"]))
        if isinstance(use, int):
            cuts[use].append(name)
        elif use == "at":
            at[name] = draw(st.integers(0, mesh.shape[name] - 1))
    return PartitionSpec(*(draw(_entries(names)) for names in cuts), at=at)


def _entries(names: list[str]) -> st.SearchStrategy[SpecEntry]:
    """Return a strategy for the entry of one tensor axis in a spec.

    Args:
        names: Names of the mesh axes that cut the tensor axis; without names, the entry is None.
    """
    if not names:
        return st.none()
    splits = st.tuples(*(st.builds(AxisSplit, st.just(name), st.sampled_from([1, 2, 3])) for name in names))
    joint: st.SearchStrategy[SpecEntry] = st.just(tuple(names))
    return joint | splits


# Tensors with a mesh and specs.


@dataclass(frozen=True, slots=True, eq=False)
class MeshCase:
    """Tensors by key, a mesh, and partition specs.

    Attributes:
        whole: Global tensors by key, which are the oracle for `shard`.
        mesh: Mesh of the ranks.
        specs: Spec of each tensor, by key.
    """

    whole: Mapping[str, torch.Tensor]
    mesh: Mesh
    specs: Mapping[str, PartitionSpec]


@st.composite
def mesh_cases(draw: st.DrawFn, *, max_ranks: int = 12, max_axes: int = 2) -> MeshCase:
    """Return a strategy for one or two tensors of any shape and dtype, a mesh, and specs that fit both.

    A rank may hold one box of a tensor, several, or none.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        max_ranks: Upper bound on the number of ranks of the mesh.
        max_axes: Upper bound on the number of axes of a tensor.

    Examples:
        >>> from hypothesis import find
        >>> case = find(mesh_cases(), lambda case: True)
        >>> case.whole["w"].shape, case.mesh, case.specs
        (torch.Size([]), Mesh(dp=1), {'w': PartitionSpec()})
    """
    mesh = draw(meshes(max_ranks=max_ranks))
    keys = draw(st.lists(st.sampled_from(["w", "layer.w", "é"]), min_size=1, max_size=2, unique=True))
    kinds = st.sampled_from(PRINTABLE_DTYPES)
    whole = {key: draw(tensors(shapes(max_axes=max_axes), dtype=kinds)) for key in keys}
    specs = {key: draw(partition_specs(tuple(tensor.shape), mesh)) for key, tensor in whole.items()}
    return MeshCase(whole, mesh, specs)
