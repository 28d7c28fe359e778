"""Optimizer states of the parameters that a transform changes: they are changed too, wherever they are in a tree.

States are moments, step counts, and copies of a parameter's own values: master weights and averages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..core.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from ..core.trees import checked_keys, match_keys
from ..errors import CheckpointingException, TreeError, error_text
from ._flat import flat_tensors, replace_named
from ._groups import NamedParameters, key_ends, renamed_in_groups
from ._places import Flat, entry_of, name_of, on_tree, renamed
from ._state_keys import StateKey, state_keys

_BY_NUMBER = re.compile(r"(?:.+\.)?state\.[0-9]+\.[^.]+", re.DOTALL)
"""Pattern of a state under its parameter's number, as in the result of ``optimizer.state_dict()``."""


def by_number(key: str) -> bool:
    """Return whether a state's key contains its parameter's number instead of its name.

    Examples:
        >>> by_number("optimizer.state.3.exp_avg"), by_number("optimizer.state.exp_avg.w")
        (True, False)
    """
    return _BY_NUMBER.fullmatch(key) is not None


def same_shape(state: ShardedBase, parameter: ShardedBase) -> bool:
    """Return whether a state is a tensor of its parameter's shape, as moments are.

    Examples:
        >>> import torch
        >>> weight = ShardedTensor.from_rank_offsets("w", torch.ones(2))
        >>> same_shape(replace(weight, key="exp_avg.w"), weight)
        True
    """
    return (
        isinstance(state, ShardedTensor)
        and isinstance(parameter, ShardedTensor)
        and state.global_shape == parameter.global_shape
    )


@dataclass(frozen=True, slots=True)
class StateChange:
    """A transform's effect on the optimizer states of the parameters that it changes.

    Attributes:
        change: The transform, which gets a flat tree in which states have their parameters' keys.
        fits: Function of a state and its parameter that returns whether the transform applies to the state.
        others: Treatment of numbers and objects that don't fit: they stay, are copied to each new parameter, or raise
            an error.
        is_lost: Function of a state's key, called if the tree lacks the state's parameter. It returns whether this is
            an error; if not, the state stays.
        change_copies: The transform for copies of a parameter's own values, such as master weights; None to use
            `change`.
        renames: Whether parameters get other keys. Names in an optimizer's groups are then changed too.
    """

    change: Callable[[Flat], Mapping[str, Any]]
    fits: Callable[[ShardedBase, ShardedBase], bool] = same_shape
    others: Literal["stay", "copy", "refuse"] = "stay"
    is_lost: Callable[[str], bool] = by_number
    change_copies: Callable[[Flat], Mapping[str, Any]] | None = None
    renames: bool = True


def carry_states(doing: str, tree: Flat, new: Flat, own: Collection[str], change: StateChange) -> dict[str, Any]:
    """Return a tree whose parameters a transform has changed, with their optimizer states transformed too.

    Args:
        doing: Name of the transform in error messages.
        tree: The flat tree before the transform.
        new: The flat tree after the transform of the parameters; its other entries are unchanged.
        own: Entries (keys of `tree`) that the transform has already changed: parameters, or states that it matched.
        change: Effect of the transform on states.

    Raises:
        TreeError: A state can't be related to one parameter, or can't be changed; the error names the keys.

    Examples:
        >>> import torch
        >>> from shardtree.transforms._flat import replace_entries
        >>> shards = [ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in ("model.a", "opt.mu.a")]
        >>> def change(flat):
        ...     shards = {entry: [replace(leaf, key="model.b")] for entry, leaf in flat.items()}
        ...     return replace_entries("rename", flat, shards)
        >>> tree = {shard.key: shard for shard in shards}
        >>> new = {"model.a": replace(shards[0], key="model.b"), "opt.mu.a": shards[1]}
        >>> [leaf.key for leaf in carry_states("rename", tree, new, {"model.a"}, StateChange(change)).values()]
        ['model.b', 'opt.mu.b']
    """
    shards = {entry: leaf for entry, leaf in tree.items() if isinstance(leaf, ShardedBase)}
    parameters = {shards[entry].key: shards[entry] for entry in own}
    plain = {leaf.key for entry, leaf in shards.items() if is_plain_value(entry, leaf)}
    states, unclear = state_keys({leaf.key for leaf in shards.values()} - plain, plain)
    groups: dict[tuple[str, str, str], list[str]] = {}
    named = {leaf.key for leaf in shards.values()} - plain - states.keys() - unclear.keys()
    known = NamedParameters(
        parameters if change.renames else {}, key_ends(named if change.renames else ()), change.change
    )
    replaced, wrong = _in_groups(known, shards, own)
    for entry, leaf in shards.items():
        owners = unclear.get(leaf.key)
        state = states.get(leaf.key)
        if entry in own:
            continue
        if state is not None and state.parameter in parameters:
            groups.setdefault((state.before, state.root, state.after), []).append(entry)
        elif (problem := _unrelated(leaf, owners, parameters, change)) is not None:
            wrong.append(problem)
    for entries in groups.values():
        group = {entry: (shards[entry], states[shards[entry].key]) for entry in entries}
        wrong += _misfits(group, parameters, change)
        if not wrong:
            replaced |= {entry: [] for entry in entries}
            replaced[entries[0]] = list(_changed(group, parameters, change))
    if wrong:
        raise stuck(doing, wrong)
    return replace_named(doing, new, replaced)


def _unrelated(leaf: ShardedBase, owners: Sequence[str] | None, parameters: Flat, change: StateChange) -> str | None:
    """Return an error text for a state that can neither be related to one parameter nor stay; None for other leaves.

    Args:
        leaf: Leaf of the tree.
        owners: Keys of the parameters to which the leaf may belong: several, or () if none is found. None if the leaf
            doesn't look like a state, or belongs to exactly one parameter.
        parameters: Changed parameters by key.
        change: Effect of the transform on states.
    """
    if owners and not parameters.keys().isdisjoint(owners):
        return f"{leaf.key!r}: may belong to {' or '.join(map(repr, owners))}"
    is_lost = owners == () and change.is_lost(leaf.key) and _has_axes(leaf)
    return f"{leaf.key!r}: belongs to no parameter in the tree" if is_lost else None


_Replaced = dict[str, Sequence[tuple[str, Any]]]


def _in_groups(known: NamedParameters, shards: Flat, own: Collection[str]) -> tuple[_Replaced, list[str]]:
    """Return replacements for sharded objects that list names of renamed or removed parameters; and error texts.

    Args:
        known: Renaming of the parameters.
        shards: Shards and sharded objects by entry.
        own: Entries that the transform has already changed, which are left out.

    Returns:
        The new objects, as (entry, object), by the entry that they replace; and a text for each list of names that
        can't be changed.
    """
    replaced: _Replaced = {}
    wrong: list[str] = []
    for entry, leaf in shards.items() if known.changed else ():
        if isinstance(leaf, ShardedObject) and entry not in own:
            new, problems = renamed_in_groups(known, leaf)
            wrong += problems
            if new is not leaf:
                replaced[entry] = [(entry, new)]
    return replaced, wrong


def map_tensors(
    doing: str,
    tree: Any,
    keys: Sequence[str],
    change: Callable[[ShardedTensor], ShardedTensor],
    in_states: Callable[[ShardedTensor], ShardedTensor] | None = None,
) -> Any:
    """Return the tree with a function applied to tensors whose keys match patterns; keys stay.

    The tensors' optimizer states of the same shape are changed too.

    Args:
        doing: Name of the transform in error messages.
        tree: Any tree.
        keys: Patterns of keys.
        change: Function from a tensor's shard to the new one, with the same key.
        in_states: Function for moments; None to use `change`. States that copy the tensor's own values, such as master
            weights, always get `change`.

    Raises:
        TreeError: A pattern matches no key, or a state can't follow its parameter.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("h.0.w", torch.ones(2))
        >>> list(map_tensors("call", {"h.0.w": shard, "step": 3}, ["h.*.w"], lambda shard: shard))
        ['h.0.w', 'step']
    """
    keys, inner = checked_keys(doing, keys), in_states or change

    def changed(flat: Flat) -> dict[str, Any]:
        shards = flat_tensors(flat)
        matches = match_keys(doing, keys, {shard.key for shard in shards.values()})
        new = {entry: change(shard) for entry, shard in shards.items() if shard.key in matches}
        return carry_states(doing, flat, {**flat, **new}, new, states)

    states = StateChange(
        lambda states: {entry: inner(leaf) for entry, leaf in states.items()},
        is_lost=lambda _: False,
        renames=False,
        change_copies=lambda states: {entry: change(leaf) for entry, leaf in states.items()},
    )
    return on_tree(doing, tree, changed)


def stuck(doing: str, lines: Sequence[str]) -> TreeError:
    """Return the error for states that can't follow their parameters."""
    fix = (
        "If the keys of states have numbers instead of names, load with LoadOptions(parameter_names=[...]). "
        "Otherwise, take these states out of the tree first, with `select`."
    )
    heading = f"{doing}: optimizer states that cannot be changed along with their parameters"
    return TreeError(error_text(heading, offenders=lines, fix=fix))


def renamed_states(doing: str, keys: Collection[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the new keys of states whose parameters are renamed, by the states' old keys.

    Args:
        doing: Name of the transform in error messages.
        keys: All keys of the tree.
        names: New keys by old ones, of parameters and all other renamed leaves.

    Raises:
        TreeError: A state may belong to several parameters; or a state's key omits a prefix of the parameter's old key,
            and the parameter's new key lacks this prefix.

    Examples:
        >>> renamed_states("rename", ["model.a", "opt.mu.a", "opt.nu.a"], {"model.a": "model.b", "opt.nu.a": "x"})
        {'opt.mu.a': 'opt.mu.b'}
    """
    states, unclear = state_keys(keys)
    wrong = [
        f"{key!r}: may belong to {' or '.join(map(repr, owners))}"
        for key, owners in unclear.items()
        if key not in names and not names.keys().isdisjoint(owners)
    ]
    new: dict[str, str] = {}
    for key, state in states.items():
        if key in names or state.parameter not in names:
            continue
        name = state.of(names[state.parameter])
        if name is None:
            wrong.append(f"{key!r}: its parameter {names[state.parameter]!r} is not under {state.root!r} any more")
        else:
            new[key] = name
    if wrong:
        raise stuck(doing, wrong)
    return new


_Group = Mapping[str, tuple[Any, StateKey]]


def _has_axes(leaf: ShardedBase) -> bool:
    return isinstance(leaf, ShardedTensorFactory) or bool(getattr(leaf, "global_shape", ()))


def is_plain_value(entry: str, leaf: ShardedBase) -> bool:
    """Return whether a leaf is a `ShardedObject` that stands for a plain value: it may be a state, but no parameter.

    Args:
        entry: Key of the leaf in the flattened tree.
        leaf: The leaf.
    """
    return isinstance(leaf, ShardedObject) and entry_of(entry).is_plain


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, ShardedObject) or (isinstance(leaf, ShardedTensor) and not leaf.global_shape)


def _misfits(group: _Group, parameters: Mapping[str, ShardedBase], change: StateChange) -> list[str]:
    """Return a text for each state that can neither be changed nor stay as it is."""
    others = [(leaf, state) for leaf, state in group.values() if not change.fits(leaf, parameters[state.parameter])]
    return [
        f"{leaf.key!r} of {state.parameter!r}: " + ("a value per parameter" if _is_number(leaf) else "another shape")
        for leaf, state in others
        if change.others == "refuse" or not _is_number(leaf)
    ]


def _namer(group: _Group) -> Callable[[str, Any, str], tuple[str, Any]]:
    """Return a function that renames states of one kind, such as `exp_avg`, like their parameters.

    Its arguments are a state's old entry (key in the flattened tree), the new leaf, and the parameter's new key. It
    returns the state's new entry, and the leaf with the state's new key.
    """
    names = {name_of(entry, leaf): entry_of(entry) for entry, (leaf, _) in group.items()}
    origins = {entry_of(entry).place: entry for entry in group}
    first, kind = next(iter(group.values()))

    def named(entry: str, leaf: Any, parameter: str) -> tuple[str, Any]:
        key = kind.of(parameter)
        if key is None:
            found, expected = f"its parameter's new key {parameter!r}", f"a key that begins with {kind.root!r}"
            heading = f"the optimizer state {first.key!r} cannot be renamed along with its parameter"
            fix = "Choose such a key, or take the state out of the tree first, with `select`."
            raise TreeError(error_text(heading, found=found, expected=expected, fix=fix))
        new, origin = replace(leaf, key=key), origins[entry_of(entry).place]
        name = renamed(origin, group[origin][0], new)
        taken = names.get(name_of(name, new))
        return name if taken is None else taken.of_kind(name), new

    return named


def _changed(group: _Group, parameters: Mapping[str, ShardedBase], change: StateChange) -> Iterator[tuple[str, Any]]:
    """Yield the names and leaves that replace all states of one kind, such as `exp_avg`."""
    named = _namer(group)
    leaf, kind = next(iter(group.values()))
    fitting = {entry: leaf for entry, (leaf, state) in group.items() if change.fits(leaf, parameters[state.parameter])}
    as_parameters = {entry: replace(leaf, key=group[entry][1].parameter) for entry, leaf in fitting.items()}
    if as_parameters:
        try:
            transform = change.change_copies if kind.is_copy and change.change_copies else change.change
            changed = transform(as_parameters)
        except CheckpointingException as error:
            error.add_note(f"in states with keys such as {leaf.key!r}")
            raise
        yield from (named(entry, new, new.key) for entry, new in changed.items())
    for entry, (other, state) in group.items():
        if entry in fitting:
            continue
        parameter: Any = parameters[state.parameter].without_data()
        keys = [new.key for new in change.change({entry: parameter}).values()] if change.others == "copy" else None
        yield from [(entry, other)] if keys is None else (named(entry, other, key) for key in keys)
