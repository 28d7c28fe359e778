"""Transforms of single tensors: removing and adding padding, and reordering axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..core.geometry import integer, integers, refuse
from ..core.lazy import computed
from ..core.mapping import ShardedTensor
from ..core.trees import join_data, padding_like
from ..errors import MetadataError, ShapeError, error_text
from ._flat import check_plain, resized, whole_axis
from ._states import map_tensors

# Padding at the end of an axis, such as that of a vocabulary.


def unpad_tensors(tree: Any, keys: Sequence[str], length: int, *, axis: int = 0) -> Any:
    """Return the tree with tensors cut off at a length along an axis, as views.

    Moments of an optimizer are cut off too. The removed elements of lazy tensors are never read. Undoes `pad_tensors`.

    Args:
        tree: Any tree; a plain tensor's key is its path.
        keys: Patterns of the tensors' keys; each ``*`` matches one part between dots.
        length: Remaining length, in elements.
        axis: Axis of the tensors; other axes may be sharded.

    Raises:
        TreeError: A pattern matches nothing.
        ShapeError: A tensor is shorter, or the shard isn't whole along the axis.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> table = ShardedTensor.from_rank_offsets("embedding.weight", torch.ones(128, 4))
        >>> unpad_tensors({"embedding.weight": table}, ["embedding.weight"], 100)["embedding.weight"].global_shape
        (100, 4)
    """
    return map_tensors("unpad_tensors", tree, keys, partial(_unpad, length=length, axis=axis))


def _unpad(shard: ShardedTensor, length: int, axis: int) -> ShardedTensor:
    at = whole_axis("unpad_tensors", shard, axis)
    length = integer(f"unpad_tensors: {shard.key!r}", "length", length)
    if not 0 <= length <= shard.local_shape[at]:
        expected = f"0 to {shard.local_shape[at]}, its length along axis {at}"
        heading = f"unpad_tensors: {shard.key!r} cannot be cut to this length"
        raise ShapeError(error_text(heading, found=length, expected=expected))
    return resized(shard, shard.key, at, length, None if shard.data is None else shard.data.narrow(at, 0, length))


_Fill = float | Callable[[torch.Tensor], torch.Tensor]


def pad_tensors(
    tree: Any,
    keys: Sequence[str],
    length: int,
    *,
    axis: int = 0,
    fill: float | Callable[[torch.Tensor], torch.Tensor] = 0,
) -> Any:
    """Return the tree with tensors made longer along an axis, at the end; undone by `unpad_tensors`.

    Tensors in memory are copied; lazy ones aren't read. Moments of an optimizer, found as in `keep_layers`,
    are padded with zeros. Master weights and averages hold the tensor's values: they get `fill` too.

    Args:
        tree: Any tree; a plain tensor's key is its path.
        keys: Patterns of the tensors' keys; each ``*`` matches one part between dots.
        length: New length, in elements.
        axis: Axis of the tensors; other axes may be sharded.
        fill: Value of the new elements: a number, or a function of the tensor. The function returns a tensor without
            the axis, which is repeated at each new index: ``lambda table: table.double().mean(0)`` gives new words the
            mean of the old ones. The result is converted to the tensor's dtype. For a lazy tensor, the function is
            called with all elements when the first new one is read. If other axes are sharded, the function gets only
            the rank's own part, so each value must depend only on elements with the same index along those axes.

    Raises:
        TreeError: A pattern matches nothing.
        ShapeError: A tensor is longer, the shard isn't whole along the axis, the number doesn't fit the dtype, or the
            function returned another shape.
        MetadataError: `fill` is neither a number nor a function.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> tree = {"b": ShardedTensor.from_rank_offsets("b", torch.tensor([1.0, 2.0]))}
        >>> pad_tensors(tree, ["b"], 3)["b"].data
        tensor([1., 2., 0.])
        >>> pad_tensors(tree, ["b"], 4, fill=torch.mean)["b"].data
        tensor([1.0000, 2.0000, 1.5000, 1.5000])
    """
    if not (callable(fill) or (isinstance(fill, int | float | complex) and not isinstance(fill, bool))):
        fix = "Pass a number, such as fill=0, or a function from the tensor to the value at each new index."
        found = type(fill).__name__
        refuse("pad_tensors", "fill", found, "a number or a function", fix, error=MetadataError)
    longer = partial(_pad, length=length, axis=axis)
    return map_tensors("pad_tensors", tree, keys, partial(longer, fill=fill), partial(longer, fill=0))


def _pad(shard: ShardedTensor, length: int, axis: int, fill: _Fill) -> ShardedTensor:
    at = whole_axis("pad_tensors", shard, axis)
    length = integer(f"pad_tensors: {shard.key!r}", "length", length)
    if length < shard.local_shape[at]:
        heading = f"pad_tensors: `length` is shorter than {shard.key!r}"
        found, expected = f"length={length}", f"at least {shard.local_shape[at]}, the tensor's length along axis {at}"
        raise ShapeError(error_text(heading, found=found, expected=expected, fix="Pass the length with the padding."))
    if length == shard.local_shape[at]:
        return shard
    return resized(shard, shard.key, at, length, None if shard.data is None else _pad_data(shard, at, length, fill))


def _pad_data(shard: ShardedTensor, at: int, length: int, fill: _Fill) -> Any:
    data = shard.data
    shape = (*data.shape[:at], length - data.shape[at], *data.shape[at + 1 :])
    padding = _fill_values(shard, at, fill).expand(shape) if callable(fill) else padding_like(data, shape, fill)
    return join_data(torch.cat, [data, padding], at)


def _fill_values(shard: ShardedTensor, at: int, fill: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Call `fill` with a shard's tensor, insert an axis of length 1 at position `at` of the result, and return it.

    `fill` must return a tensor of the shard's shape without axis `at`; any other result raises a ShapeError.
    """
    data = shard.data
    shape = (*data.shape[:at], *data.shape[at + 1 :])

    def checked(elements: torch.Tensor) -> torch.Tensor:
        values: Any = fill(elements.detach())
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != shape:
            kind = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
            expected = f"a tensor of shape {shape}, the shape of {shard.key!r} without axis {at}"
            heading = f"pad_tensors: fill returned an unusable value for {shard.key!r}"
            raise ShapeError(error_text(heading, found=kind, expected=expected))
        return values.detach().to(data.dtype)

    return computed(checked, data, shape, data.dtype).unsqueeze(at)


# Reordered axes, for programs that store matrices transposed.


def transpose_tensors(tree: Any, keys: Sequence[str], axes: Sequence[int] | None = None) -> Any:
    """Return the tree with the axes of tensors in another order, as views; undone by the inverse order.

    Args:
        tree: Any tree; a plain tensor's key is its path. Shards may be cut along any axes.
        keys: Patterns of the tensors' keys; each ``*`` matches one part between dots.
        axes: Old axis for each new one, as in ``torch.permute``; reversed by default.

    Raises:
        TreeError: A pattern matches nothing, or a shard is flat or has prepended axes.
        ShapeError: The axes aren't a permutation of a tensor's axes.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> left = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (1, 0, 4))
        >>> transpose_tensors({"w": left}, ["w"])["w"].global_shape
        (12, 2)
    """
    return map_tensors("transpose_tensors", tree, keys, partial(_transpose, axes=axes))


def _transpose(shard: ShardedTensor, axes: Sequence[int] | None) -> ShardedTensor:
    check_plain("transpose_tensors", shard)
    count = len(shard.local_shape)
    axes = range(count)[::-1] if axes is None else integers(f"transpose_tensors: {shard.key!r}", "axes", axes)
    order = [axis + count if axis < 0 else axis for axis in axes]
    if sorted(order) != list(range(count)):
        expected = f"each axis of {shard.local_shape} once"
        raise ShapeError(
            error_text(f"transpose_tensors: wrong axes of {shard.key!r}", found=list(axes), expected=expected)
        )

    def ordered(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[axis] for axis in order)

    return replace(
        shard,
        data=None if shard.data is None else shard.data.permute(*order),
        local_shape=ordered(shard.local_shape),
        global_shape=ordered(shard.global_shape),
        global_offset=ordered(shard.global_offset),
        axis_fragmentations=None if shard.axis_fragmentations is None else ordered(shard.axis_fragmentations),
    )
