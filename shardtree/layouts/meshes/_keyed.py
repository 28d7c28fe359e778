"""A tree's tensors, each under its key, and which of them are one tensor that is there several times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import IntegrityError, MetadataError, TreeError, TreePath, error_text, render_path
from ...lazy import LazyTensor
from ...mapping import ShardedTensor
from ...mapping.memory import SHAPE_FIX, without_shape
from ...trees import call_at, diff, path_key

KeyFunction = Callable[[TreePath], str]
"""From a leaf's path to the key of its tensor."""


def keyed_tensors(
    doing: str, pairs: Sequence[tuple[TreePath, Any]], key: KeyFunction | None
) -> dict[TreePath, ShardedTensor]:
    """Return a tree's tensors, by path: each as a whole shard under its key; shards are left out.

    Raises:
        MetadataError: `key` isn't a function, or gives what is no key.
        TreeError: a tensor isn't dense.

    Examples:
        >>> keyed_tensors("shard", [(("a", "w"), torch.zeros(2))], None)["a", "w"].key
        'a.w'
    """
    if key is not None and not callable(key):
        fix = "Pass a function from a leaf's path, a tuple, to its key."
        raise MetadataError(error_text(f"{doing}: key isn't a function", found=type(key).__name__, fix=fix))
    strange = [f"{render_path(path)}: {found}" for path, leaf in pairs if (found := _strange(leaf))]
    if strange:
        dense = "Shard dense tensors, as .to_dense() and .dequantize() give them."
        fix = SHAPE_FIX if any(without_shape(leaf) for _, leaf in pairs) else dense
        raise TreeError(error_text(f"{doing}: not dense", offenders=strange, fix=fix))
    tensors = [(path, leaf) for path, leaf in pairs if isinstance(leaf, (torch.Tensor, LazyTensor))]
    return {path: _keyed(call_at(path, key or path_key, path), leaf) for path, leaf in tensors}


def _strange(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor) or (shapeless := without_shape(leaf)):
        return shapeless if isinstance(leaf, torch.Tensor) else ""
    return str(leaf.layout) if leaf.layout != torch.strided or leaf.is_quantized else ""


def _keyed(key: str, leaf: Any) -> ShardedTensor:
    data, shape = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tuple(leaf.shape)
    return ShardedTensor(key, data, leaf.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))


def copies_by_path(
    doing: str, keyed: Iterable[tuple[TreePath, ShardedTensor]], given: Mapping[TreePath, Any], key: KeyFunction | None
) -> dict[TreePath, int]:
    """Return how many tensors with its key come before each; it is an error where nobody gave them that key.

    Args:
        doing: named in the error.
        keyed: the tensors with their keys, in the tree's order.
        given: the tree's leaves: shards bring their own keys.
        key: the user's function, if there is one.

    Raises:
        TreeError: two paths have one key, and neither shards nor `key` say so.
        IntegrityError: tensors of one key aren't the same tensor.

    Examples:
        >>> tied = torch.zeros(2)
        >>> pairs = [(("in",), tied), (("out",), tied)]
        >>> copies_by_path("shard", keyed_tensors("shard", pairs, lambda path: "w").items(), dict(pairs), path_key)
        {('in',): 0, ('out',): 1}
    """
    first: dict[str, tuple[TreePath, ShardedTensor]] = {}
    count: dict[str, int] = {}
    copies = {}
    for path, shard in keyed:
        other_path, other = first.setdefault(shard.key, (path, shard))
        copies[path] = count[shard.key] = count.get(shard.key, -1) + 1
        if not copies[path]:
            continue
        offenders = [render_path(other_path), render_path(path)]
        if key is None and not all(isinstance(given[each], ShardedTensor) for each in (other_path, path)):
            fix = "Pass key=, or rename one of them."
            raise TreeError(error_text(f"{doing}: two paths have the key {shard.key!r}", offenders=offenders, fix=fix))
        if not _same(other, shard):
            fix = "Give each tensor a key of its own; one key is for one tensor that is there twice"
            fix += ", and a lazy one, which isn't read to compare, for the same lazy tensor."
            what = f"{doing}: different tensors have the key {shard.key!r}"
            raise IntegrityError(error_text(what, offenders=offenders, fix=fix))
    return copies


def _same(left: ShardedTensor, right: ShardedTensor) -> bool:
    """Return whether shards are of one tensor, as far as can be told where there is nothing to compare."""
    if (left.dtype, left.global_shape) != (right.dtype, right.global_shape):
        return False
    one, other = left.data, right.data
    if one is None or other is None:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other  # lazy: what they would read may differ
    is_one_view = (one.device, one.data_ptr(), one.stride()) == (other.device, other.data_ptr(), other.stride())
    return is_one_view or not diff(one, other)
