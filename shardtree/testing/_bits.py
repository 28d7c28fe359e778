"""Comparing tensors and trees bit for bit, and assembling all ranks' shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ..core.mapping import ShardedTensor, same_value
from ..core.trees import entries, leaves_with_paths, map_shards, node_data
from ..errors import TreePath

# Bits are compared rather than values, so that NaNs equal themselves, and NaN payloads and signed zeros count.

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_NUMPY_FLOATS = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bits, in a dtype of the same item size that torch can copy and index.

    Examples:
        >>> carried(torch.tensor([-1.0]).bfloat16())
        tensor([-16512], dtype=torch.int16)
    """
    return tensor.detach().resolve_conj().resolve_neg().view(_CARRIERS[tensor.itemsize])


def bits(tensor: torch.Tensor) -> bytes:
    r"""Return a tensor's elements as bytes, in row-major order, whatever its dtype, strides and device.

    Examples:
        >>> bits(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).T)
        b'\x01\x03\x02\x04'
    """
    # as_strided: a tensor of one element counts as contiguous with any strides, but view refuses them.
    whole = carried(tensor).cpu().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def first_difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return a description of the first difference between two tensors; None if they are equal bit for bit.

    Examples:
        >>> first_difference(torch.tensor([[1, 2], [3, 5]]), torch.tensor([[1, 2], [3, 4]]))
        '1 of 4 elements differ, the first one at (1, 1): found 5, expected 4'
    """
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"found {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    left, right = (np.frombuffer(bits(tensor), np.uint8).reshape(-1, tensor.itemsize) for tensor in (found, expected))
    wrong = np.flatnonzero((left != right).any(axis=1))
    if not wrong.size:
        return None
    place = tuple(int(index) for index in np.unravel_index(wrong[0], found.shape or (1,)))[: found.ndim]
    left_text, right_text = (_element(tensor, int(wrong[0])) for tensor in (found, expected))
    count = f"{wrong.size} of {found.numel()} elements differ"
    return f"{count}, the first one at {place}: found {left_text}, expected {right_text}"


def check_equal(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise AssertionError, beginning with `what`, unless two tensors are equal bit for bit."""
    difference = first_difference(found, expected)
    assert difference is None, f"{what}: {difference}"


def check_same(what: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise AssertionError, beginning with `what`, unless two mappings have equal keys and bitwise equal tensors."""
    assert sorted(found) == sorted(expected), f"{what}: found {sorted(found)}, expected {sorted(expected)}"
    wrong = {key: first_difference(found[key], tensor) for key, tensor in expected.items()}
    lines = [f"{key!r}: {difference}" for key, difference in wrong.items() if difference is not None]
    assert not lines, "\n  ".join([what, *lines])


def _element(tensor: torch.Tensor, number: int) -> str:
    size = tensor.itemsize
    raw = bits(tensor)[number * size : (number + 1) * size]
    # Floats are shown with their bits: two NaNs differ only in these, and torch can't print some dtypes.
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype is not torch.bool:
        return str(int.from_bytes(raw, "little", signed=tensor.dtype.is_signed))
    text = f"0x{raw[::-1].hex()}"
    if tensor.dtype not in _NUMPY_FLOATS:
        return text
    return f"{float(np.frombuffer(raw, _NUMPY_FLOATS[tensor.dtype])[0]):.6g} ({text})"


def outline(value: Any) -> Any:
    """Return a value's content in a form that `==` can compare, by types, order and bits, but not by identity.

    Containers, registered classes, dataclasses, tensors and numpy arrays are compared by content, functions by code and
    captured values, anything else by its type and repr.

    Examples:
        >>> outline({"a": [1, float("nan")]}) == outline({"a": [1, float("nan")]})
        True
        >>> outline([1]) == outline([True]) or outline((1,)) == outline([1])
        False
    """
    kind = type(value)
    if isinstance(value, torch.Tensor) and is_lazy(value):
        return kind, value.dtype
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, tuple(value.shape), None if value.is_meta else bits(value)
    if isinstance(value, np.ndarray):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return kind, [(outline(key), outline(child)) for key, child in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return kind, [outline(child) for child in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted((outline(child) for child in value), key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return kind, [(field.name, outline(getattr(value, field.name))) for field in fields(value)]
    if (children := entries(value)) is not None:
        return kind, outline(node_data(value)), [(outline(entry), outline(child)) for entry, child in children.items()]
    return kind, (CallableOutline(value) if callable(value) else repr(value))


@dataclass(frozen=True, slots=True, eq=False)
class CallableOutline:
    """A function in the result of `outline`; two are equal if the functions have the same code and captured values.

    Attributes:
        function: Any callable.
    """

    function: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallableOutline) and same_value(self.function, other.function)

    __hash__ = None  # type: ignore[assignment]  # captured values are rarely hashable


# All ranks' shards are assembled element by element, slowly and simply, since this must be independent of the code that
# it checks.


def shards_of(tree: Any) -> dict[TreePath, ShardedTensor]:
    """Return the tensor shards of a tree, by path."""
    return {path: leaf for path, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedTensor)}


def assemble(trees: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Return the global tensors, by key, assembled from all ranks' shards.

    Raises:
        AssertionError: An element is on no rank, or its replicas differ in a bit.

    Examples:
        >>> shards = [ShardedTensor.from_rank_offsets("w", torch.full((2,), rank), (0, rank, 2)) for rank in (0, 1)]
        >>> assemble([{"w": shard} for shard in shards])
        {'w': tensor([0, 0, 1, 1])}
    """
    shards: dict[str, list[ShardedTensor]] = {}
    for tree in trees:
        for leaf in shards_of(tree).values():
            shards.setdefault(leaf.key, []).append(leaf)
    return {key: _whole(key, parts) for key, parts in shards.items()}


def _whole(key: str, shards: list[ShardedTensor]) -> torch.Tensor:
    shape, dtype = shards[0].global_shape, shards[0].dtype
    number = torch.arange(torch.Size(shape).numel(), device="cpu").view(shape)
    whole = carried(torch.empty(number.numel(), dtype=dtype, device="cpu")).zero_()
    is_there = torch.zeros(number.numel(), dtype=torch.bool, device="cpu")
    for shard in shards:
        at = number[shard.global_slice()].reshape(-1)[shard.flattened_range or slice(None)]
        new, is_copy = carried(shard.data).reshape(-1), is_there[at]
        check_equal(f"copies of {key!r} differ", new[is_copy], whole[at][is_copy])
        whole[at], is_there[at] = new, True
    missing = int((~is_there).sum())
    assert not missing, f"{missing} of {is_there.numel()} elements of {key!r} are on no rank"
    return whole.view(dtype).view(shape)


def refilled(target: Any, result: Any) -> Any:
    """Return the target with each shard's data replaced by the tensor that was loaded at its path.

    Args:
        target: A tree of shards.
        result: Result of `load` for this target.

    Examples:
        >>> target = {"w": [ShardedTensor("w", None, torch.int64, (2,), (2,), (0,), None)]}
        >>> refilled(target, {"step": 3, "w": [torch.tensor([4, 5])]})["w"][0].data
        tensor([4, 5])
    """
    tensor_at = dict(leaves_with_paths(result))
    places = {id(leaf): path for path, leaf in leaves_with_paths(target)}

    def fill(leaf: Any) -> Any:
        return replace(leaf, data=tensor_at[places[id(leaf)]]) if isinstance(leaf, ShardedTensor) else leaf

    return map_shards(fill, target)
