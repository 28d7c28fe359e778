"""Parameter names in an optimizer's groups, which follow renamed and removed parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..core.mapping import ShardedBase, ShardedObject
from ..core.trees import entries, like
from ..errors import CheckpointingException, TreeError
from ._places import Flat, PlacedName, entry_of

_LISTS: Final = ("params", "param_names")


def map_names(change: Callable[[str, list[str]], list[str]], value: Any, path: Sequence[Any] = ()) -> Any:
    """Return a value with a function applied to the lists of names in ``param_groups``; other parts are shared.

    Args:
        change: Function of a list's path, joined by dots, and its names.
        value: Any value or tree.
        path: Path of the value; in a sharded object, the object's key, split at the dots.

    Examples:
        >>> groups = [{"lr": 1, "params": ["a", "b"]}]
        >>> map_names(lambda _, names: names[1:], {"param_groups": groups, "params": ["a"]})
        {'param_groups': [{'lr': 1, 'params': ['b']}], 'params': ['a']}
    """
    if isinstance(value, ShardedObject):
        data = map_names(change, value.data, value.key.split("."))
        return value if data is value.data else replace(value, data=data)
    children = entries(value)
    if not children:
        return value
    new: Mapping[Any, Any]
    if _are_names(path, value, children):
        new = dict(enumerate(change(".".join(map(str, path)), list(children.values()))))
    else:
        new = {entry: map_names(change, child, (*path, entry)) for entry, child in children.items()}
    is_same = new.keys() == children.keys() and all(new[entry] is child for entry, child in children.items())
    return value if is_same else like(value, new)


def _are_names(path: Sequence[Any], value: Any, children: Mapping[Any, Any]) -> bool:
    is_list = bool(path) and path[-1] in _LISTS and "param_groups" in path and not isinstance(value, Mapping)
    return is_list and all(isinstance(child, str) for child in children.values())


@dataclass(frozen=True, slots=True)
class NamedParameters:
    """Renaming of parameters in an optimizer's groups, which have lists of names.

    A listed name is a parameter's key, or a suffix of the key, such as ``h.0.w`` for ``model.h.0.w``.

    Attributes:
        changed: Parameters that a transform renames or removes, by key.
        ends: Parameters' keys by each of their suffixes, from `key_ends`.
        rename: The transform. It gets the changed parameters of one list as a flat tree, in which the list's other
            names are plain values.
    """

    changed: Mapping[str, ShardedBase]
    ends: Mapping[str, Sequence[str]]
    rename: Callable[[Flat], Mapping[str, Any]]

    def of(self, names: Iterable[str]) -> list[str]:
        """Return the new names for a list of parameter names; removed parameters are left out.

        A name may omit a prefix of the parameter's key, such as ``model.``. Its new name omits the same prefix.

        Raises:
            CheckpointingException: A name is a suffix of several keys, the transform fails for a tree with only this
                list's parameters, or a new key doesn't begin with the omitted prefix.
        """
        names, flat, roots = list(names), dict[str, Any](), dict[int, str]()
        for number, name in enumerate(names):
            those = self.ends.get(name, ())
            owners = [name] if name in those else those
            if self.changed.keys().isdisjoint(owners):
                flat[PlacedName(f"\0{number}", (number,))] = name
            elif len(owners) > 1:
                raise TreeError(f"{name!r} may be {' or '.join(map(repr, sorted(owners)))}")
            else:
                flat[PlacedName(owners[0], (number,))] = self.changed[owners[0]].without_data()
                roots[number] = owners[0].removesuffix(name)
        if not roots:
            return names
        return [
            leaf if isinstance(leaf, str) else _without(roots[entry_of(entry).place[0]], leaf.key)
            for entry, leaf in self.rename(flat).items()
        ]


def key_ends(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys by suffix; a suffix is the whole key, or the rest of it after one of its dots.

    Examples:
        >>> key_ends(["a.w", "w"])
        {'a.w': ['a.w'], 'w': ['a.w', 'w']}
    """
    ends: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        parts = key.split(".")
        for at in range(len(parts)):
            ends[".".join(parts[at:])].append(key)
    return dict(ends)


def _without(root: str, key: str) -> str:
    if not key.startswith(root):
        raise TreeError(f"{key!r} is not under {root!r}")
    return key.removeprefix(root)


def renamed_in_groups(known: NamedParameters, value: Any) -> tuple[Any, list[str]]:
    """Return a value with new parameter names in its groups, and an error text for each list that can't be renamed."""
    wrong: list[str] = []

    def change(path: str, names: list[str]) -> list[str]:
        try:
            return known.of(names)
        except CheckpointingException as error:
            wrong.append(f"{path!r}: {str(error).splitlines()[0]}")
            return names

    return map_names(change, value), wrong
