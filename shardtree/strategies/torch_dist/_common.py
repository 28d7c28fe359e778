"""The common state: in an object of its own, or each value for itself, with its place in the nested state beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CorruptCheckpoint, error_text, render_path
from ...storage import Storage
from ...trees import HOLE
from .._values import Checkpoint, Fields
from ..base import StrategyAction, register_default_strategy
from ._backends import DCP, INDEX_FILE, TORCH_DIST
from ._decode import decoded
from ._listing import COMMON_OBJECT, is_object, read_listing
from ._load import unboxed

_MOST_GAPS = 100_000
"""How many places of lists may be empty: a list's own length isn't stored."""


@register_default_strategy(StrategyAction.RECOGNIZE, *DCP)
def recognize(storage: Storage) -> Fields | None:
    """Return the backends of a folder that torch.distributed.checkpoint wrote, None if it isn't one."""
    # With a common.pt beside it, it is Megatron-Core's, and was never finished: its last file is missing.
    if storage.length(INDEX_FILE) is None or storage.length("common.pt") is not None:
        return None
    sharded = {"sharded_backend": DCP[0], "sharded_backend_version": DCP[1]}
    return sharded | {"common_backend": DCP[0], "common_backend_version": DCP[1]}


@register_default_strategy(StrategyAction.LOAD_COMMON, *TORCH_DIST)
def load_common(checkpoint: Checkpoint) -> Any:
    """Return the common state that Megatron-Core keeps as an object since it writes no common.pt.

    Raises:
        CorruptCheckpoint: there is none.
        UnsafeFile: it needs code to run, and `allow_pickle` isn't given.
    """
    listing = read_listing(checkpoint)
    if COMMON_OBJECT not in listing.values:
        where = checkpoint.storage.where()
        fix = "The checkpoint wasn't finished, or was edited; load another one."
        raise CorruptCheckpoint(error_text(f"load: {where!r} has no common state", expected=COMMON_OBJECT, fix=fix))
    ((_, value),) = decoded(checkpoint, listing, [listing.values[COMMON_OBJECT]])
    return unboxed(value)


@register_default_strategy(StrategyAction.LOAD_COMMON, *DCP)
def load_dcp_common(checkpoint: Checkpoint) -> Any:
    """Return the nested state that was saved, with holes where tensors were.

    Raises:
        CorruptCheckpoint: the places of its values contradict each other.
        UnsafeFile: a value needs code to run, and `allow_pickle` isn't given.
    """
    listing = read_listing(checkpoint)
    numbers = {name: number for name, number in listing.values.items() if not is_object(name)}
    values = dict(decoded(checkpoint, listing, list(numbers.values())))
    leaves = dict.fromkeys(listing.contents.tensors, HOLE) | {name: values[number] for name, number in numbers.items()}
    paths = listing.contents.paths or {}
    try:
        return nested({paths.get(name, (name,)): value for name, value in leaves.items()})
    except ValueError as error:
        what = f"open: {checkpoint.storage.where(INDEX_FILE)!r} is not sound"
        fix = "It was damaged or made by another program; load another checkpoint."
        raise CorruptCheckpoint(error_text(what, found=error, fix=fix)) from error


def nested(leaves: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Return leaves as nested dicts and lists: where an entry of a path is a number, it is a position in a list.

    What holds nothing but holes is a hole itself, save the outermost dict. Positions of a list that nothing is stored
    for are None, as torch.distributed.checkpoint has it.

    Raises:
        ValueError: paths contradict each other.

    Examples:
        >>> nested({("model", "w"): HOLE, ("steps", 0): 3, ("steps", 1, "lr"): 0.1})
        {'model': HOLE, 'steps': [3, {'lr': 0.1}]}
    """
    root = _Node()
    for path, value in leaves.items():
        node = root
        for entry in path[:-1]:
            child = node.setdefault(entry, _Node())
            if not isinstance(child, _Node):
                raise ValueError(f"{render_path(path)} lies inside of another value")
            node = child
        if path[-1] in node:
            raise ValueError(f"{render_path(path)} is there twice")
        node[path[-1]] = value
    _check_lists(root)
    return _container(root)


class _Node(dict[str | int, Any]):
    """A container that is being filled, by name or by position."""


def _check_lists(root: _Node) -> None:
    """Raise unless each container has names or positions alone, and its positions leave few places empty."""
    gaps, nodes = 0, [root]
    while nodes:
        node = nodes.pop()
        nodes += [child for child in node.values() if isinstance(child, _Node)]
        positions = [entry for entry in node if isinstance(entry, int)]
        if positions and (len(positions) != len(node) or min(positions) < 0):
            raise ValueError("a container has entries that are no positions beside some that are")
        gaps += max(positions, default=-1) + 1 - len(positions)
    if gaps > _MOST_GAPS:
        raise ValueError(f"lists with {gaps} places that nothing is stored for")


def _container(node: _Node) -> dict[Any, Any] | list[Any]:
    """Return a container as the dict or list that it is."""
    children = {entry: _closed(child) if isinstance(child, _Node) else child for entry, child in node.items()}
    if any(isinstance(entry, int) for entry in children):
        return [children.get(position) for position in range(int(max(children)) + 1)]
    return children


def _closed(node: _Node) -> Any:
    """Return a container within another one, a hole where it holds nothing but holes."""
    container = _container(node)
    inside = container.values() if isinstance(container, dict) else container
    return HOLE if all(value is HOLE for value in inside) else container
