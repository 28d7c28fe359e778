"""The common state: one object in Megatron-Core's checkpoints, an archive for each value in DCP's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any

from ...errors import CorruptCheckpoint, TreeError, TreePath, error_text, render_path
from ...kit import HOLE, Checkpoint, is_hollow, is_subclass, leaves_with_paths, path_key, without_holes
from ..torch import load_archive
from ..unique_keys import is_object
from ._dict_kinds import at_paths, decode_value
from ._listing import COMMON_OBJECT, META_FILE, has_meta, read_listing
from ._load import unboxed
from ._metadata_file import INDEX_FILE, unsound
from ._payloads import decoded

_MOST_GAPS = 100_000
"""Upper bound of the empty positions in lists: lengths aren't stored, and a crafted path may have a huge position."""


def load_common(checkpoint: Checkpoint) -> Any:
    """Return the common state that newer releases of Megatron-Core store as an object, rather than in common.pt.

    Raises:
        CorruptCheckpoint: There is no such object.
        UnsafeFile: Reading it would run pickled code, and `allow_pickle` isn't given.
    """
    listing = read_listing(checkpoint)
    if COMMON_OBJECT not in listing.values:
        where = checkpoint.storage.where()
        fix = "The checkpoint was not finished, or was edited; load another one."
        raise CorruptCheckpoint(error_text(f"load: {where!r} has no common state", expected=COMMON_OBJECT, fix=fix))
    ((_, value),) = decoded(checkpoint, listing, [listing.values[COMMON_OBJECT]])
    return unboxed(value)


def load_dcp_common(checkpoint: Checkpoint) -> Any:
    """Return the nested state that was saved, with holes for tensors, and with the content of Lightning's meta.pt.

    Raises:
        CorruptCheckpoint: The paths of values contradict each other, or meta.pt can't be read.
        UnsafeFile: Reading a value would run pickled code, and `allow_pickle` isn't given.
    """
    listing = read_listing(checkpoint)
    numbers = {name: number for name, number in listing.values.items() if not is_object(name)}
    values = dict(decoded(checkpoint, listing, list(numbers.values()), decode_value))
    # Tensors stay holes, which the target's shards fill: loading the common state must not read them.
    leaves = dict.fromkeys(listing.contents.tensors, HOLE) | {
        name: values[number][0] for name, number in numbers.items()
    }
    paths = listing.contents.paths or {}
    try:
        kinds = at_paths((paths.get(name, (name,)), values[number][1]) for name, number in numbers.items())
        state = nested({paths.get(name, (name,)): value for name, value in leaves.items()}, kinds)
        return _with_meta(state, load_archive(checkpoint, META_FILE)) if has_meta(checkpoint) else state
    except ValueError as error:
        raise unsound(checkpoint.storage.where(INDEX_FILE), error) from error


def _with_meta(state: dict[str, Any], meta: Any) -> dict[str, Any]:
    twice = sorted(map(str, state.keys() & meta.keys())) if isinstance(meta, dict) else ["not a dict"]
    if twice:
        raise ValueError(f"{META_FILE} contradicts the other files: {', '.join(twice)[:200]}")
    return {**state, **meta}


def nested(leaves: Mapping[TreePath, Any], kinds: Mapping[TreePath, dict[Any, Any]] = MappingProxyType({})) -> Any:
    """Return leaves as nested dicts and lists; a number in a path is a position in a list.

    `HOLE` is the placeholder of a shard. A container with nothing but `HOLE` becomes `HOLE` itself, except for the
    outermost dict. List positions without a stored value become None, as in torch.distributed.checkpoint.

    Args:
        leaves: Values by their paths.
        kinds: Empty dict of the right type, for the path of each dict that isn't plain, such as an OrderedDict.

    Raises:
        ValueError: Paths contradict each other.

    Examples:
        >>> nested({("model", "w"): HOLE, ("steps", 0): 3, ("steps", 1, "lr"): 0.1})
        {'model': HOLE, 'steps': [3, {'lr': 0.1}]}
    """
    root = _Container()
    root.kind = kinds.get((), {})
    for path, value in leaves.items():
        node = root
        for depth, entry in enumerate(path[:-1], 1):
            child = node.setdefault(entry, _Container())
            if not isinstance(child, _Container):
                raise ValueError(f"{render_path(path)} lies inside of another value")
            child.kind = kinds.get(path[:depth], {}) if kinds else {}
            node = child
        if path[-1] in node:
            raise ValueError(f"{render_path(path)} is there twice")
        node[path[-1]] = value
    _check_lists(root)
    return _container(root)


class _Container(dict[str | int, Any]):
    """A dict or list that is being filled: its keys are names for a dict, positions for a list.

    Attributes:
        kind: Empty dict of the container's type, such as an OrderedDict; a plain dict for a list.
    """

    kind: dict[Any, Any] = {}  # noqa: RUF012 (never changed)


def _check_lists(root: _Container) -> None:
    """Raise ValueError if a container's keys mix names with list positions, or if lists have too many gaps."""
    # The nodes are in a list rather than on the call stack, since paths come from a file and may be deep.
    gaps, nodes = 0, [root]
    while nodes:
        node = nodes.pop()
        nodes += [child for child in node.values() if isinstance(child, _Container)]
        positions = [entry for entry in node if isinstance(entry, int)]
        if positions and (len(positions) != len(node) or min(positions) < 0):
            raise ValueError("a container has both names and positions as entries")
        if positions and type(node.kind) is not dict:
            raise ValueError("a list is recorded as a dict")
        gaps += max(positions, default=-1) + 1 - len(positions)
    if gaps > _MOST_GAPS:
        raise ValueError(f"lists with {gaps} positions without a stored value")


def _container(node: _Container) -> dict[Any, Any] | list[Any]:
    """Return the list or dict that a filled container stands for: a list if its keys are positions, else a dict."""
    children = {entry: _close(child) if isinstance(child, _Container) else child for entry, child in node.items()}
    if any(isinstance(entry, int) for entry in children):
        return [children.get(position) for position in range(int(max(children)) + 1)]
    container = node.kind.copy()
    container.update(children)
    return container


def _close(node: _Container) -> Any:
    """Return a nested container as a dict or a list, or as a hole if it contains only holes."""
    container = _container(node)
    inside = container.values() if isinstance(container, dict) else container
    return HOLE if all(value is HOLE for value in inside) else container


# This section lists the common state as torch.distributed.checkpoint does: each plain value with its name and path.

Value = tuple[TreePath, Any]


def named_values(common: Any) -> dict[str, Value]:
    """Return the plain values of a common tree with their paths, by name: the path joined by dots.

    Dicts and lists that contain dicts are flattened; any other value is stored whole. This is DCP's own rule, except
    that values which DCP would lose are stored whole too: an empty dict (DCP omits it), a dict whose keys aren't
    all strings (DCP makes strings of them), a list of tensors (DCP doesn't find the names of plain values in it when a
    checkpoint is converted), a list with holes in place of shards (DCP loses the positions before a value), and an
    instance of a subclass, such as a Counter.

    Args:
        common: Common state, such as `common_with_holes` returns.

    Raises:
        TreeError: The common state isn't a dict, or two values have one name.

    Examples:
        >>> for name, value in named_values({"step": 3, "groups": [{"lr": 0.1}, {"lr": 0.2}]}).items():
        ...     print(name, *value)
        step ('step',) 3
        groups.0.lr ('groups', 0, 'lr') 0.1
        groups.1.lr ('groups', 1, 'lr') 0.2
    """
    values: dict[str, Value] = {}
    for path, value in _top_values(common):
        name = path_key(path)
        if name in values:
            offenders = [render_path(other) for other in (values[name][0], path)]
            fix = "Rename one of them; torch.distributed.checkpoint names a value by its path, joined by dots."
            raise TreeError(error_text(f"save: two values named {name!r}", offenders=offenders, fix=fix))
        values[name] = (path, value)
    return values


def _top_values(common: Any) -> Iterator[Value]:
    plain = without_holes(common)
    if isinstance(plain, dict) and _has_texts(plain):
        for key, value in plain.items():
            yield from _values((key,), value)
    elif any(leaf is not HOLE for _, leaf in leaves_with_paths(plain)):
        heading = "save: torch.distributed.checkpoint stores plain values only in a dict with strings as keys"
        raise TreeError(error_text(heading, found=f"a {type(common).__name__}", fix="Put the tree in such a dict."))


def _values(path: TreePath, node: Any) -> Iterator[Value]:
    if isinstance(node, dict) and not _is_one_value(node):
        for key, value in node.items():
            yield from _values((*path, key), value)
    elif isinstance(node, list) and not _is_one_value(node):
        for position, value in enumerate(node):
            yield from _values((*path, position), value)
    else:
        yield path, node


def _has_texts(node: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in node)


def _is_one_value(node: Any) -> bool:
    """Return whether a node is stored whole: neither a dict to be flattened nor a list that contains such a dict."""
    if is_subclass(node):
        return True
    if isinstance(node, dict):
        return not node or not _has_texts(node)
    return not isinstance(node, list) or any(child is HOLE for child in node) or all(map(_is_one_value, node))


def without_hollow(values: dict[str, Value], shard_keys: Set[str]) -> dict[str, Value]:
    """Return plain values by name, without empty containers that have the name of a tensor or an object.

    Such a container isn't a plain value: other ranks have shards in the same container.

    Examples:
        >>> without_hollow({"w": (("w",), []), "step": (("step",), 3)}, {"w"})
        {'step': (('step',), 3)}
    """
    return {
        name: (path, value)
        for name, (path, value) in values.items()
        if shard_keys.isdisjoint((name, path[0])) or not is_hollow(value)
    }


def check_names(values: dict[str, Value], shard_keys: Set[str]) -> None:
    """Raise if plain values have names of tensors or objects.

    Args:
        values: Values with their paths, by name.
        shard_keys: Keys of the stored tensors and unique keys of the stored objects.

    Raises:
        TreeError: A value is named like a tensor or an object, or lies in a dict that is named like one.

    Examples:
        >>> check_names({"w.lr": (("w", "lr"), 0.1)}, {"w"})
        Traceback (most recent call last):
        ...
        shardtree.errors.TreeError: save: plain values have names of tensors or of possible objects
          tree['w']['lr'] has the name of 'w'
          Rename the shards or the values: torch.distributed.checkpoint keeps all of them in one dict.
    """
    wrong = [
        f"{render_path(path)} has the name of {place!r}"
        for name, (path, _) in values.items()
        for place in dict.fromkeys((name, path[0]))
        if place in shard_keys
    ]
    wrong += [
        f"{render_path(path)} is named like an object's key" for name, (path, _) in values.items() if is_object(name)
    ]
    if wrong:
        fix = "Rename the shards or the values: torch.distributed.checkpoint keeps all of them in one dict."
        raise TreeError(
            error_text("save: plain values have names of tensors or of possible objects", offenders=wrong, fix=fix)
        )
