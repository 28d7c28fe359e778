"""Edits of a tree's shards: their keys, dtypes, boxes and data. Unchanged parts are shared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NoReturn

import torch

from ...errors import KeyMismatch, ShapeError, TreeError, error_text
from ..geometry import check_type
from ..lazy import INTEGERS, LazyTensor, as_integers, stored
from ..mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from ._key_patterns import checked_keys, match_keys, near_names, with_guesses
from ._maps import check_function, described_kind, map_sharing, with_data
from ._nodes import SameTree, Tree, flatten
from ._scaled import SCALED_DTYPES, plain_matcher, refuse_scaled, scaled_values

# Creation and concatenation of tensors of any dtype, as integers, for which torch has all operators.


def empty_data(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return an uninitialised tensor, like ``torch.empty`` but without its warning about some dtypes.

    Examples:
        >>> empty_data((2, 3), torch.complex32, "meta").dtype
        torch.complex32
    """
    return torch.empty(tuple(shape), dtype=INTEGERS.get(dtype.itemsize, dtype), device=device).view(dtype)


def full_data(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, fill: float) -> torch.Tensor:
    """Return a tensor filled with a number; zero is possible for every dtype.

    Raises:
        ShapeError: The dtype can't hold the number exactly.

    Examples:
        >>> full_data((2,), torch.bfloat16, "cpu", 0.5)
        tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    if not fill or not prod(shape):
        return as_integers(empty_data(shape, dtype, device)).zero_().view(dtype)
    try:
        tensor = torch.full(tuple(shape), fill, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:
        _refuse_fill(fill, dtype, error)
    # For integer dtypes torch drops fractions silently, so the tensor's element is compared with the number.
    is_real = dtype.is_floating_point or dtype.is_complex
    if not is_real and tensor.device.type != "meta" and tensor.reshape(-1)[0].item() != fill:
        _refuse_fill(fill, dtype, f"{tensor.reshape(-1)[0].item()} after conversion to that dtype")
    return tensor


def _refuse_fill(fill: float, dtype: torch.dtype, actual: object) -> NoReturn:
    what = f"a tensor of {dtype} cannot hold the padding {fill}"
    raise ShapeError(error_text(what, found=actual, fix="Pad with a number that this dtype can hold."))


@cache
def torch_converts(before: torch.dtype, after: torch.dtype) -> bool:
    """Return whether `torch.Tensor.to` converts elements of one dtype to another.

    Examples:
        >>> torch_converts(torch.float8_e4m3fn, torch.float32), torch_converts(torch.bits16, torch.float32)
        (True, False)
    """
    try:
        # A trial instead of a list, since each release of torch may add dtypes and conversions.
        torch.zeros(before.itemsize, dtype=torch.uint8, device="cpu").view(before).to(after)
    except (RuntimeError, TypeError):  # packed dtypes, such as float4, have no conversions
        return False
    return True


def padding_like(data: Any, shape: Sequence[int], fill: float) -> Any:
    """Return a tensor of a shape, filled with a number, for joining with `data`.

    It has the dtype and device of `data`, and is a lazy tensor if `data` is one.

    Examples:
        >>> padding_like(torch.ones(3), (2,), 7)
        tensor([7., 7.])
    """
    if not isinstance(data, LazyTensor):
        return full_data(shape, data.dtype, data.device, fill)
    full_data((1,), data.dtype, "cpu", fill)  # refuses an unfit number now, not when the tensor is read
    # The number is part of the name, by which conversions tell lazy tensors apart.
    return stored(
        lambda _, box: full_data(box, data.dtype, "cpu", fill), shape, data.dtype, name=f"padding of {fill!r}"
    )


def join_data(join: Callable[..., Any], parts: Sequence[Any], axis: int) -> Any:
    """Join tensors along an axis; return a lazy tensor if they are lazy.

    Args:
        join: The function `torch.cat` or `torch.stack`.
        parts: Tensors of one dtype, all of them lazy or none.
        axis: Axis along which they are joined.

    Raises:
        ShapeError: The tensors have different dtypes.

    Examples:
        >>> join_data(torch.stack, [torch.zeros(2), torch.ones(2)], 0)
        tensor([[0., 0.],
                [1., 1.]])
    """
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return join(parts, dim=axis)
    if len({part.dtype for part in parts}) > 1:
        of_each = [f"{number}: {part.dtype}" for number, part in enumerate(parts)]
        fix = "Convert them to one dtype first."
        raise ShapeError(error_text("tensors of several dtypes cannot be joined", offenders=of_each, fix=fix))
    return join(list(map(as_integers, parts)), dim=axis).view(parts[0].dtype)


Renaming = Mapping[str, str] | Callable[[str], str]


def rename(tree: SameTree, names: Renaming) -> SameTree:
    """Return the tree with other shard keys; the tree's structure doesn't change.

    Unless keys collide, renaming with the inverse mapping undoes a renaming. Factories pass their new key to the shards
    that they build.

    Args:
        tree: Any tree.
        names: Mapping from old to new keys, where missing keys stay unchanged; or a function of the old key.

    Raises:
        KeyMismatch: A mapping names a key that the tree doesn't have.
        TreeError: Two keys would become equal.
        MetadataError: `names` is neither a mapping nor a function.

    Examples:
        >>> from shardtree.mapping import ShardedObject
        >>> rename({"rng": ShardedObject("rng", 1, (1,), (0,))}, {"rng": "rng_state"})["rng"].key
        'rng_state'
    """
    keys = dict.fromkeys(leaf.key for leaf in flatten(tree)[0] if isinstance(leaf, ShardedBase))
    if isinstance(names, Mapping):
        _check_names(names, keys)
    else:
        check_function("rename", "names", names, "a mapping or a function")
    new = {key: names.get(key, key) if isinstance(names, Mapping) else names(key) for key in keys}
    _check_injective(new)

    def on_leaf(leaf: Any) -> Any:
        is_same = not isinstance(leaf, ShardedBase) or new[leaf.key] == leaf.key
        return leaf if is_same else replace(leaf, key=new[leaf.key])

    return map_sharing(on_leaf, tree)


def _check_names(names: Mapping[str, str], keys: Collection[str]) -> None:
    unknown = [name for name in names if name not in keys]
    if not unknown:
        return
    lines = with_guesses(unknown, near_names([name for name in unknown if isinstance(name, str)], keys))
    fix = "Correct them; where ranks hold different keys, pass a function, such as lambda key: names.get(key, key)."
    raise KeyMismatch(error_text("rename: no shard of the tree has these keys", offenders=lines, fix=fix))


def _check_injective(new: Mapping[str, str]) -> None:
    old: dict[str, list[str]] = {}
    for before, after in new.items():
        old.setdefault(after, []).append(before)
    collisions = [f"{after!r} from {', '.join(map(repr, before))}" for after, before in old.items() if len(before) > 1]
    if collisions:
        fix = "Give each key a name of its own. To join tensors, use a factory instead of rename."
        raise TreeError(error_text("rename: different keys would become one", offenders=collisions, fix=fix))


def prefix(tree: SameTree, text: str) -> SameTree:
    """Return the tree with a prefix before each shard key.

    Examples:
        >>> from shardtree.mapping import ShardedObject
        >>> prefix([ShardedObject("rng", 1, (1,), (0,))], "model.")[0].key
        'model.rng'
    """
    check_type("prefix", "text", text, str, "Pass the prefix of each key, with its dot: 'model.'.")
    return rename(tree, lambda key: text + key)


def cast(
    tree: SameTree, dtype: torch.dtype, keys: Sequence[str] | None = None, *, plain: Sequence[str] = ()
) -> SameTree:
    """Return the tree with its floating-point shards in another floating-point dtype, metadata and data.

    Integer and bool shards, plain tensors and other values stay unchanged. A factory's tensor is cast too. Shards that
    already have the dtype are shared. Quantised values raise ShapeError if their scales are in the tree.

    Args:
        tree: Any tree.
        dtype: New dtype.
        keys: Patterns of the keys of shards to cast, all by default; ``*`` matches one part between dots, ``**`` any
            number of them. An optimizer's states have keys of their own.
        plain: Patterns of the keys of FP8 tensors that need no scales, although other tensors are named like their
            scales.

    Raises:
        ShapeError: `dtype` isn't a floating-point dtype; or torch can't convert a shard to it (for pairs of 4-bit
            floats, for example, no conversion exists); or quantised values would be cast without their scales.
        MetadataError: `dtype` isn't a dtype of torch.
        TreeError: A pattern matches no key, or `keys` isn't a list.
        KeyMismatch: A pattern of `plain` matches no key.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> tree = [ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in ("norm.weight", "up.weight")]
        >>> [shard.dtype for shard in cast(tree, torch.bfloat16)]
        [torch.bfloat16, torch.bfloat16]
        >>> [shard.dtype for shard in cast(tree, torch.bfloat16, ["up.*"])]
        [torch.float32, torch.bfloat16]
    """
    check_type("cast", "dtype", dtype, torch.dtype, "Pass a dtype of torch, such as torch.bfloat16.")
    if not dtype.is_floating_point:
        fix = "Use `map_shards` to convert to another kind of dtype."
        raise ShapeError(error_text("cast: not a floating-point dtype", found=dtype, fix=fix))
    fits: Callable[[str], bool] | None = None
    if keys is not None:
        patterns, shards = checked_keys("cast", keys), map(_key_of, flatten(tree)[0])
        fits = match_keys("cast", patterns, dict.fromkeys(key for key in shards if key is not None)).__contains__
    is_plain = plain_matcher("cast", plain, lambda: filter(None, map(_key_of, flatten(tree)[0])))
    values, fixed = dict[str, torch.dtype](), dict[str, torch.dtype]()

    def on_leaf(leaf: Any) -> Any:
        old = _dtype_of(leaf)
        if old in {None, dtype} or not old.is_floating_point:
            return leaf
        if fits is not None and not (isinstance(leaf, ShardedBase) and fits(leaf.key)):
            return leaf
        if not torch_converts(old, dtype):
            fixed[leaf.key] = old
            return leaf
        if old in SCALED_DTYPES and not is_plain(leaf.key):
            values[leaf.key] = old
        return _cast(leaf, dtype)

    cast_tree = map_sharing(on_leaf, tree)
    if fixed:
        fix = "Select the keys to cast with keys=[patterns]."
        lines = [f"{key!r}: {old}" for key, old in fixed.items()]
        raise ShapeError(error_text(f"cast: torch cannot convert these to {dtype}", offenders=lines, fix=fix))
    refuse_scaled("cast", values, scaled_values(values, lambda names: _dtypes_of(tree, names)))
    return cast_tree


def _key_of(leaf: Any) -> str | None:
    return leaf.key if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) else None


def _dtype_of(leaf: Any) -> torch.dtype | None:
    # A factory has no dtype of its own, so the dtype of its data is used.
    old = leaf if isinstance(leaf, ShardedTensor) else leaf.data if isinstance(leaf, ShardedTensorFactory) else None
    return getattr(old, "dtype", None)


def _dtypes_of(tree: Tree, keys: Collection[str]) -> dict[str, torch.dtype]:
    pairs = ((_key_of(leaf), _dtype_of(leaf)) for leaf in flatten(tree)[0])
    return {key: dtype for key, dtype in pairs if key is not None and dtype is not None and key in keys}


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    data = None if leaf.data is None else leaf.data.to(dtype)
    return replace(leaf, dtype=dtype, data=data) if isinstance(leaf, ShardedTensor) else replace(leaf, data=data)


def narrow(tree: Tree, dim: int, start: int, length: int) -> Tree:
    """Return the tree with each shard narrowed to [start, start + length) along an axis of its box.

    The new data are views. A box becomes one shard. A flat shard becomes a list of flat shards, possibly empty: one for
    each contiguous run of elements that remains.

    Args:
        tree: Any tree without factories.
        dim: Axis of `local_shape`.
        start: First index to keep, in elements of the local box.
        length: Number of indices to keep.

    Raises:
        TreeError: The tree has factories, whose boxes aren't known before they are applied.
        ShapeError: The range doesn't fit a shard; a note of the error names the shard's path.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> w = ShardedTensor.from_rank_offsets("w", torch.ones(4, 3))
        >>> narrow({"w": w}, 1, 0, 2)["w"].local_shape
        (4, 2)
    """
    return map_sharing(lambda leaf: _narrow(leaf, dim, start, length), tree)


def _narrow(leaf: Any, dim: int, start: int, length: int) -> Any:
    if isinstance(leaf, ShardedTensorFactory):
        what = f"narrow: {leaf.key!r} is a factory, whose boxes are not known yet"
        raise TreeError(error_text(what, fix="Call `apply_factories` on the tree first."))
    if not isinstance(leaf, ShardedTensor):
        return leaf
    parts = leaf.narrow(dim, start, length)
    return parts[0] if leaf.flattened_range is None else parts


def without_data(tree: SameTree, *, meta: bool = False) -> SameTree:
    """Return the tree with None, or meta tensors, as the data of each shard, factory and sharded object.

    With meta tensors, functions that don't read elements return the same metadata, shapes and dtypes as for the tree
    itself, as with `jax.eval_shape`; factories can still build. With None, a factory may not know its tensor's shape.

    Args:
        tree: Any tree. Plain values, tensors included, stay unchanged.
        meta: Whether shards and factories get tensors on torch's meta device, which hold no elements. A flat shard's
            tensor has the length of its range; objects, and factories without a tensor, get None.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedObject, ShardedTensor
        >>> tree = [ShardedObject("rng", 1, (1,), (0,)), ShardedTensor.from_rank_offsets("w", torch.ones(2))]
        >>> [leaf.data for leaf in without_data(tree)]
        [None, None]
        >>> [leaf.data for leaf in without_data(tree, meta=True)]
        [None, tensor(..., device='meta', size=(2,))]
    """
    drop = _with_meta_data if meta else _without_data
    return map_sharing(lambda leaf: drop(leaf) if isinstance(leaf, ShardedBase) else leaf, tree)


def _with_meta_data(leaf: Any) -> Any:
    kind = None if isinstance(leaf, ShardedObject) else described_kind(leaf)
    if kind is None:
        return _without_data(leaf)
    if isinstance(leaf.data, torch.Tensor) and leaf.data.is_meta:
        return leaf
    dtype, shape = kind
    return with_data(leaf, empty_data(shape, dtype, "meta"))


def _without_data(leaf: Any) -> Any:
    if leaf.data is None:
        return leaf
    return leaf.without_data() if isinstance(leaf, ShardedObject) else with_data(leaf, None)
