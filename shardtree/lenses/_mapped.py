"""Lenses that permute or split one axis, or leave out its padding: each index is stored once, or is padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..core.geometry import Column, integer, refuse
from ..core.lazy import as_integers
from ..core.mapping import ShardedTensor
from ..core.trees import full_data, join_data, padding_like
from ..errors import CheckpointingException, MetadataError, ShapeError, error_text
from ._axis_runs import PADDING, AxisBlock, AxisRuns, grouped_runs, joined_parts, stored_blocks
from ._lens import Lens, StoredForm, check_box, check_exact, checked_axis, device_of, positive, with_values
from ._renamed import check_names, replaced_part


def mapped_axis(
    axis: int,
    runs: Callable[[int], AxisRuns],
    *,
    part: str | None = None,
    names: Sequence[str] | None = None,
    fill: float = 0,
    doing: str = "mapped_axis",
) -> Lens:
    """Return the lens that maps one axis to stored tensors by runs of indices; other axes stay unchanged.

    A rank's box becomes as few stored boxes as possible. A stored box is a view if its indices are consecutive in the
    model's box, else a copy.

    Args:
        axis: Axis of the model's tensor, not counting prepended axes (`prepend_axis_num`).
        runs: Function from the length of the whole axis to its `AxisRuns`, which may depend on nothing else.
        part: Part of the key that the names replace.
        names: Name of each stored tensor; without names there is one stored tensor, which keeps the key.
        fill: Value that a merged tensor gets for elements that aren't stored.
        doing: Name of the lens in errors.

    Raises:
        MetadataError: `runs` isn't a function.
        TreeError: `part` and `names` are not given together, the names are not one different string for each stored
            tensor, or the key does not have the part exactly once.
        ShapeError: The tensor has no such axis, the runs have another total length, or there are several stored tensors
            without names. When tensors are merged: the dtype cannot represent the fill value.

    Examples:
        >>> from shardtree.lenses import grouped_runs
        >>> lens = mapped_axis(0, lambda n: grouped_runs(n, 2, (n // 4,) * 2), part="w", names=("a", "b"))
        >>> built = lens(ShardedTensor.from_rank_offsets("w", torch.arange(8)))
        >>> {shard.key: shard.data.tolist() for shard in built.shards}
        {'a': [0, 1, 4, 5], 'b': [2, 3, 6, 7]}
        >>> built.merge([shard.data for shard in built.shards])
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if not callable(runs):
        fix = "Pass a function from the length of the whole axis to AxisRuns."
        refuse(doing, "runs", type(runs).__name__, "a function", fix, error=MetadataError)
    if names is not None or part is not None:
        check_names(doing, part, names, len(list(names or ())) or 1)

    def lens(shard: ShardedTensor) -> StoredForm:
        check_exact(doing, shard)
        at = checked_axis(doing, shard, axis)
        axis_runs = _runs_of(doing, shard, runs, at)
        keys = _keys(doing, shard.key, len(axis_runs.sizes), part, names)
        return _stored_form(shard, at, axis_runs, keys, fill)

    return lens


def _runs_of(doing: str, shard: ShardedTensor, runs: Callable[[int], AxisRuns], axis: int) -> AxisRuns:
    length = shard.global_shape[axis + shard.prepend_axis_num]
    try:
        axis_runs = runs(length)
    except CheckpointingException as error:
        error.add_note(f"{doing}: axis {axis} of {shard.key!r}, whose global shape is {shard.global_shape}")
        raise
    found = f"AxisRuns for {axis_runs.total}" if isinstance(axis_runs, AxisRuns) else type(axis_runs).__name__
    if not isinstance(axis_runs, AxisRuns) or axis_runs.total != length:
        heading = f"{doing}: the result of `runs({length})` does not cover axis {axis} of {shard.key!r}"
        expected = f"AxisRuns for {length} indices, since the global shape is {shard.global_shape}"
        raise ShapeError(error_text(heading, found=found, expected=expected))
    return axis_runs


def _keys(doing: str, key: str, count: int, part: str | None, names: Sequence[str] | None) -> list[str]:
    if part is None or names is None:
        if count != 1:
            heading = f"{doing}: {key!r} is stored as {count} tensors, but they have no names"
            fix = "Pass names=, with a name for each of them, and part=, the part of the key that the names replace."
            raise ShapeError(error_text(heading, fix=fix))
        return [key]
    # The number of parts is known only with the axis's length.
    check_names(doing, part, names, count)
    return [replaced_part(doing, key, part, name) for name in names]


def _stored_form(shard: ShardedTensor, at: int, runs: AxisRuns, keys: Sequence[str], fill: float) -> StoredForm:
    place = at + shard.prepend_axis_num
    begin = shard.global_offset[place]
    blocks = stored_blocks(runs, begin, begin + shard.local_shape[at])
    if not shard.global_shape[place]:  # an empty tensor must be stored too, or it would be missing
        blocks = [AxisBlock(each, 0, np.zeros(0, dtype=np.int64)) for each in range(len(runs.sizes))]
    shards = tuple(_stored_box(shard, at, block, keys[block.part], runs.sizes[block.part]) for block in blocks)
    return StoredForm(shards, lambda parts: _merge_blocks(shard, at, blocks, parts, fill))


def _stored_box(shard: ShardedTensor, at: int, block: AxisBlock, key: str, size: int) -> ShardedTensor:
    place = at + shard.prepend_axis_num
    return replace(
        shard,
        key=key,
        data=None if shard.data is None else _gather(shard.data, at, block.places),
        local_shape=with_values(shard.local_shape, at, (len(block.places),)),
        global_shape=with_values(shard.global_shape, place, (size,)),
        global_offset=with_values(shard.global_offset, place, (block.start,)),
        axis_fragmentations=None,  # all ranks' cuts decide whether the grid is regular
    )


def _gather(data: Any, at: int, index: Column) -> Any:
    """Return the elements at some indices of an axis: a view if the indices are consecutive."""
    cuts = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    if len(cuts) <= 2:
        return data.narrow(at, int(index[0]) if len(index) else 0, len(index))
    if isinstance(data, torch.Tensor):
        # As integers, bit for bit: torch has no `index_select` for some dtypes.
        places = torch.from_numpy(np.ascontiguousarray(index)).to(data.device)
        return as_integers(data).index_select(at, places).view(data.dtype)
    return torch.cat([data.narrow(at, int(index[low]), high - low) for low, high in pairwise(cuts)], dim=at)


def _merge_blocks(shard: ShardedTensor, at: int, blocks: Sequence[AxisBlock], parts: Sequence[Any], fill: float) -> Any:
    length = shard.local_shape[at]
    places = np.concatenate([*(block.places for block in blocks), np.zeros(0, dtype=np.int64)])
    absent = np.setdiff1d(np.arange(length), places)
    pieces = list(parts)
    if absent.size or not pieces:
        shape, device = with_values(shard.local_shape, at, (len(absent),)), device_of(shard.data)
        # Lazy if the pieces are, since they are concatenated.
        pieces.append(padding_like(pieces[0], shape, fill) if pieces else full_data(shape, shard.dtype, device, fill))
    order = np.empty(length, dtype=np.int64)
    order[np.concatenate([places, absent])] = np.arange(length)
    whole = pieces[0] if len(pieces) == 1 else join_data(torch.cat, pieces, at)
    return _gather(whole, at, order)


# Padded axes, such as a vocabulary's. Padding isn't stored, so that it may differ between layouts.


def padded_axis(size: int, *, axis: int = 0, fill: float = 0) -> Lens:
    """Return the lens that leaves out the padding at the end of an axis.

    Megatron-Core pads a vocabulary to a multiple that depends on the number of tensor-parallel ranks. A rank that holds
    nothing but padding stores nothing.

    Args:
        size: Length of the axis without padding, as it is stored.
        axis: Axis of the model's tensor, not counting prepended axes (`prepend_axis_num`).
        fill: Value of the padding in a merged tensor; the padding of a saved tensor may have any value.

    Raises:
        MetadataError: The size is not an integer.
        ShapeError: The size is negative, or the tensor has no such axis, or a shorter one.

    Examples:
        >>> import torch
        >>> lens = padded_axis(5)
        >>> built = lens(ShardedTensor.from_rank_offsets("embedding", torch.arange(4), (0, 1, 2)))  # rows 4 to 7 of 8
        >>> [(part.global_shape, part.global_offset, part.data) for part in built.shards]
        [((5,), (4,), tensor([0]))]
        >>> built.merge([torch.tensor([9])])
        tensor([9, 0, 0, 0])
    """
    size = integer("padded_axis", "size", size)
    if size < 0:
        refuse(
            "padded_axis", "size", size, "0 or more", "Pass the length of the axis without padding.", error=ShapeError
        )

    def runs(length: int) -> AxisRuns:
        if length < size:
            heading = "padded_axis: the axis is shorter than its length without padding"
            expected = f"at least size={size}"
            fix = "Pass as size= the length of the axis without padding, and as axis= the axis that is padded."
            raise ShapeError(error_text(heading, found=f"length {length}", expected=expected, fix=fix))
        return AxisRuns(np.array([size, length - size]), np.array([0, PADDING]), np.zeros(2, dtype=np.int64), (size,))

    inner = mapped_axis(axis, runs, fill=fill, doing="padded_axis")

    def lens(shard: ShardedTensor) -> StoredForm:
        check_box("padded_axis", shard)
        if not shard.allow_shape_mismatch:
            return inner(shard)
        # Other lenses refuse this flag, since stored places follow from the exact shape. Here they follow from `size`
        # alone: if the model's tensor may have another shape, so may the stored one.
        form = inner(replace(shard, allow_shape_mismatch=False))
        return replace(form, shards=tuple(replace(part, allow_shape_mismatch=True) for part in form.shards))

    return lens


# Gated layers (SwiGLU, GeGLU): each rank holds gate and up rows together, a checkpoint separately.


def gate_and_up(
    *, tensor_parallel: int, axis: int = 0, part: str | None = None, names: Sequence[str] | None = None
) -> Lens:
    """Return the lens that separates the gate and up rows of a gated layer's fused tensor.

    Each tensor-parallel rank holds its own gate rows, then its own up rows. If such a tensor were saved as plain rows,
    a load on another number of ranks would mix gate and up rows.

    Args:
        tensor_parallel: Number of ranks that share the layer: gate and up alternate that many times in the global
            tensor. 1 for a layer that isn't tensor parallel, even if FSDP or ZeRO shards its rows.
        axis: Axis of the gate and up rows.
        part: Part of the key that the names replace, such as ``"linear_fc1"``.
        names: Names of the separate gate and up tensors, such as ``("gate_proj", "up_proj")``. Without names both are
            stored in one tensor under the same key, all gate rows before all up rows, as Megatron-Core does.

    Raises:
        MetadataError: `tensor_parallel` isn't an integer of at least 1.
        TreeError: `part` and `names` are not given together, the names are not two different strings, or the key does
            not have the part exactly once.
        ShapeError: The axis can't be divided into `tensor_parallel` pairs of gate and up rows.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> shard = ShardedTensor.from_rank_offsets("mlp.fc1.weight", torch.arange(4), (0, 1, 2))  # rank 1 of 2
        >>> lens = gate_and_up(tensor_parallel=2, part="fc1", names=("gate_proj", "up_proj"))
        >>> [(part.key, part.global_shape, part.global_offset, part.data.tolist()) for part in lens(shard).shards]
        [('mlp.gate_proj.weight', (4,), (2,), [0, 1]), ('mlp.up_proj.weight', (4,), (2,), [2, 3])]

    References:
        Megatron-Core 0.16, `apply_swiglu_sharded_factory`.
    """
    ranks = positive("gate_and_up", "tensor_parallel", tensor_parallel)
    check_names("gate_and_up", part, names, 2)

    def runs(length: int) -> AxisRuns:
        both = grouped_runs(length, ranks, (length // (2 * ranks),) * 2)
        # Megatron-Core's form: one tensor, all gate rows first.
        return both if names is not None else joined_parts(both)

    return mapped_axis(axis, runs, part=part, names=names, doing="gate_and_up")
