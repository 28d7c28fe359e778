"""Stacking layers into one tensor with a leading axis, unstacking them, keeping some; and renaming by patterns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ..core.geometry import check_type, integers
from ..core.mapping import ShardedBase, ShardedTensor
from ..core.trees import (
    FormPiece,
    KeyForm,
    check_stars,
    fill_key,
    join_data,
    key_form,
    leaves_with_paths,
    match_keys,
    one_of,
    rename,
    shard_leaves,
    text_piece,
)
from ..errors import TreeError, error_text, missing_numbers, shorten
from ..lenses import layer_at
from ._flat import check_plain, check_same, flat_tensors, replace_entries, replace_named
from ._groups import NamedParameters, key_ends, renamed_in_groups
from ._places import Flat, entry_of, on_tree, renamed
from ._states import StateChange, by_number, carry_states, is_plain_value, renamed_states, stuck

_ALIKE = (
    *("dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id"),
    "allow_shape_mismatch",
)

_Group = dict[int, tuple[str, ShardedTensor]]


def stack_layers(tree: Any, prefix: str) -> Any:
    """Return the tree with the tensors ``<prefix>.<number>.<name>`` stacked into one ``<prefix>.<name>`` for each name.

    The layer number becomes the first axis. Tensors in memory are copied; lazy ones aren't read. An optimizer's
    moments and step counts, found as in `keep_layers`, are stacked too. `unstack_layers` undoes it, except that layers
    of a list or tuple, or with integers as keys, come back as a dict with the keys "0", "1".

    Args:
        tree: Any tree; a plain tensor's key is its path. All layers must have the same box, shape and dtype.
        prefix: Prefix of the keys; each ``*`` in it matches one part between dots, as in ``"layers.*.experts"``.

    Raises:
        TreeError: No key matches, a layer is missing, layers differ, or states can't follow their parameters.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> shards = [ShardedTensor.from_rank_offsets(f"h.{i}.w", torch.full((2,), i)) for i in range(3)]
        >>> stack_layers({shard.key: shard for shard in shards}, "h")["h.w"].data
        tensor([[0, 0],
                [1, 1],
                [2, 2]])
    """
    # Numbers have no leading zeros: unstacking must give back the same keys.
    form = KeyForm((*key_form(prefix).pieces, text_piece("."), FormPiece("number"), text_piece("."), FormPiece("rest")))

    def stacked(flat: Flat) -> dict[str, Any]:
        new = _stacks(flat, form)
        if not new:
            raise _no_match("stack_layers", f"{prefix}.<number>.<name>", flat)
        return carry_states("stack_layers", flat, replace_entries("stack_layers", flat, new), new, in_states)

    def change(states: Flat) -> dict[str, Any]:
        return replace_entries("stack_layers", states, _stacks(states, form))

    in_states = StateChange(change, lambda state, _: isinstance(state, ShardedTensor), "refuse")
    return on_tree("stack_layers", tree, stacked)


def _stacks(tree: Flat, form: KeyForm) -> dict[str, list[ShardedTensor]]:
    """Return new tensors by the entry that they replace: a list with the stacked tensor, or an empty list.

    The stacked tensor replaces the entry of the layer that comes first in the tree.
    """
    groups: dict[str, _Group] = defaultdict(dict)
    for entry, shard in flat_tensors(tree).items():
        if (match := form.match(shard.key)) is not None:
            *_, number, name = match
            before = shard.key.removesuffix(f".{number}.{name}")
            _add(groups[f"{before}.{name}"], _number("stack_layers", number), entry, shard)
    new: dict[str, list[ShardedTensor]] = {}
    for key, group in groups.items():
        new |= {entry: [] for entry, _ in group.values()}
        new[next(iter(group.values()))[0]] = [_stack(key, group)]
    return new


def _number(doing: str, text: str) -> int:
    """Return the number of a layer, parsed from a part of a key.

    Raises:
        TreeError: The number has more than 18 digits.
    """
    if len(text) > _MOST_DIGITS:
        heading = f"{doing}: the layer number {text[:12]}... in a key has {len(text)} digits"
        raise TreeError(error_text(heading, expected=f"at most {_MOST_DIGITS} digits", fix="Rename the key."))
    return int(text)


_MOST_DIGITS = 18


def _add(group: _Group, number: int, entry: str, shard: ShardedTensor) -> None:
    check_plain("stack_layers", shard)
    if number in group:
        fix = "Pass a tree with one shard of each tensor, such as the whole tensors of `open_checkpoint`."
        raise TreeError(error_text(f"stack_layers: two shards have the key {shard.key!r}", fix=fix))
    group[number] = entry, shard


def _stack(key: str, group: Mapping[int, tuple[str, ShardedTensor]]) -> ShardedTensor:
    count = max(group) + 1
    if count != len(group):
        missing = (f"layer {number}" for number in missing_numbers(group, len(group), count))
        heading, lacking = f"stack_layers: {key!r} lacks layers", count - len(group)
        raise TreeError(error_text(heading, found=f"{len(group)} of {count}", offenders=missing, count=lacking))
    layers = [group[number][1] for number in range(count)]
    check_same("stack_layers", layers, _ALIKE)
    first = layers[0]
    fragments = first.axis_fragmentations
    return replace(
        first,
        key=key,
        data=None if first.data is None else join_data(torch.stack, [layer.data for layer in layers], 0),
        local_shape=(count, *first.local_shape),
        global_shape=(count, *first.global_shape),
        global_offset=(0, *first.global_offset),
        axis_fragmentations=None if fragments is None else (1, *fragments),
    )


def unstack_layers(tree: Any, prefix: str) -> Any:
    """Return the tree with each ``<prefix>.<name>`` unstacked along its first axis: ``<prefix>.<number>.<name>``.

    The new tensors are views. A shard of some layers gives only those layers, under their global numbers. Moments of an
    optimizer are unstacked too, and each layer gets a copy of single values, such as a number of steps. New layers are
    in a dict with the keys "0", "1". Undone by `stack_layers`.

    Args:
        tree: Any tree; a plain tensor's key is its path. Keys that already have a number after the prefix stay.
        prefix: Prefix of the keys; each ``*`` in it matches one part between dots.

    Raises:
        TreeError: No key matches, a tensor has no first axis, or states can't follow their parameters.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> stacked = ShardedTensor.from_rank_offsets("h.w", torch.arange(6).reshape(3, 2))
        >>> {key: shard.data.tolist() for key, shard in unstack_layers({"h.w": stacked}, "h").items()}
        {'h.0.w': [0, 1], 'h.1.w': [2, 3], 'h.2.w': [4, 5]}
    """
    form = KeyForm((*key_form(prefix).pieces, text_piece("."), FormPiece("rest without number")))

    def layers(tree: Flat) -> dict[str, list[ShardedTensor]]:
        tensors = flat_tensors(tree)
        matches = {entry: form.match(shard.key) for entry, shard in tensors.items()}
        return {
            entry: _layers(tensors[entry], tensors[entry].key.removesuffix(f".{match[-1]}"), match[-1])
            for entry, match in matches.items()
            if match is not None
        }

    def unstacked(flat: Flat) -> dict[str, Any]:
        new = layers(flat)
        if not new:
            raise _no_match("unstack_layers", f"{prefix}.<name>", flat)
        return carry_states("unstack_layers", flat, replace_entries("unstack_layers", flat, new), new, in_states)

    def change(states: Flat) -> dict[str, Any]:
        return replace_entries("unstack_layers", states, layers(states))

    in_states = StateChange(change, _have_layers, "copy")
    return on_tree("unstack_layers", tree, unstacked)


def _have_layers(state: ShardedBase, parameter: ShardedBase) -> bool:
    """Return whether a state's first axis counts the layers of its parameter."""
    layers = parameter.global_shape[:1] if isinstance(parameter, ShardedTensor) else ()
    return isinstance(state, ShardedTensor) and state.global_shape[:1] == layers != ()


def _layers(shard: ShardedTensor, prefix: str, name: str) -> list[ShardedTensor]:
    if shard.flattened_range is not None or not shard.global_shape:
        found = "a tensor with flattened_range" if shard.flattened_range is not None else "a tensor without axes"
        raise TreeError(
            error_text(
                f"unstack_layers: {shard.key!r} has no axis of layers",
                found=found,
                expected="an unflattened tensor with axes",
            )
        )
    first = shard.global_offset[0]
    count = 1 if shard.prepend_axis_num else shard.local_shape[0]
    return [layer_at(shard, 0, number, f"{prefix}.{first + number}.{name}") for number in range(count)]


# Keeping some layers.

_STATE, _GROUP = (text_piece("state."), FormPiece("part"), text_piece(".")), (text_piece("param_group."),)
_STATES = one_of((FormPiece("parts before"), text_piece("optimizer."), one_of(_STATE, _GROUP)), ())
"""Prefix of a parameter's key in an optimizer's stored states or groups."""


def keep_layers(tree: Any, prefix: str, layers: Sequence[int], *, absent: Iterable[int] = ()) -> Any:
    """Return the tree with only some layers, numbered anew: ``layers[0]`` becomes layer 0, ``layers[1]`` layer 1.

    Layers are ``<prefix>.<number>`` and ``<prefix>.<number>.<name>``: tensors, objects and factories, sharded in any
    way. Numbers may be listed in another order, or repeatedly, for a deeper model; repeated layers share their data. A
    plain value with such a key goes with its layer. In a flat dict, this holds only for layers that also have tensors
    or sharded objects.

    An optimizer's states and groups go with their parameters, wherever they are. A state's key contains the parameter's
    key: ``optimizer.state.exp_avg.<key>``, ``optim.state.<key>.exp_avg``. First parts of the parameter's key may be
    left out: ``opt.0.mu.layers.2.w`` belongs to ``model.layers.2.w``. Names in the ``params`` of ``param_groups`` are
    renamed too.

    Args:
        tree: Any tree; the key of a plain tensor or value is its path. Renumbered leaves move to their new keys' paths.
        prefix: Prefix of the keys; each ``*`` in it matches one part between dots, as in ``"layers.*.experts"``.
        layers: Numbers of the layers to keep, in their new order.
        absent: Numbers that this rank may lack, such as those of other pipeline stages.

    Raises:
        TreeError: No key matches, a listed number has no layer, two entries would have one name, or states can't be
            related to parameters.
        MetadataError: The numbers aren't integers.

    Examples:
        >>> keys = [*(f"h.{number}.w" for number in range(4)), "optimizer.state.exp_avg.h.3.w"]
        >>> tree = {key: ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in keys}
        >>> list(keep_layers(tree, "h", [0, 3]))
        ['h.0.w', 'h.1.w', 'optimizer.state.exp_avg.h.1.w']
    """
    layers, absent = integers("keep_layers", "layers", layers), integers("keep_layers", "absent", absent)
    end = one_of((text_piece("."), FormPiece("rest")), ())
    form = KeyForm((_STATES, *key_form(prefix).pieces, text_piece("."), FormPiece("number"), end))
    # A state with a layer number whose parameter isn't in the tree can't be renumbered, so it is refused.
    numbered = re.compile(rf"(?:.+\.)?{re.escape(prefix.rpartition('.')[2])}\.[0-9]+(?:\..+)?", re.DOTALL)

    def kept(flat: Flat) -> dict[str, Any]:
        return replace_named("keep_layers", flat, _renumbered(flat, form, layers))

    def is_lost(key: str) -> bool:
        return by_number(key) or numbered.fullmatch(key) is not None

    def kept_with_states(flat: Flat) -> dict[str, Any]:
        matches = _layers_in(flat, form, prefix, layers, absent)
        new = _renumbered({entry: flat[entry] for entry in matches}, form, layers)
        in_states = StateChange(kept, lambda *_: True, is_lost=is_lost)
        return carry_states("keep_layers", flat, replace_named("keep_layers", flat, new), matches, in_states)

    return on_tree("keep_layers", tree, kept_with_states)


def _layers_in(
    flat: Flat, form: KeyForm, prefix: str, layers: Sequence[int], absent: Collection[int]
) -> dict[str, tuple[str, ...]]:
    """Return the entries of all layers, each with the texts that the parts of the pattern `form` match in its key.

    Raises:
        TreeError: A number in `layers` has no layer and isn't in `absent`; or no key matches, and `absent` is empty.
    """
    doing, shards = "keep_layers", {entry: leaf for entry, leaf in flat.items() if isinstance(leaf, ShardedBase)}
    matches = {entry: match for entry, leaf in shards.items() if (match := form.match(leaf.key)) is not None}
    # A plain value in a flat dict belongs to a layer if a tensor of that layer is present.
    loose = {entry for entry in matches if is_plain_value(entry, shards[entry]) and len(entry_of(entry).place) == 1}
    numbers = {_number(doing, match[-2]) for entry, match in matches.items() if entry not in loose}
    matches = {entry: match for entry, match in matches.items() if entry not in loose or _is_one(match[-2], numbers)}
    if not matches and not absent:
        raise _no_match(doing, f"{prefix}.<number>.<name>", flat)
    missing = [str(number) for number in dict.fromkeys(layers) if number not in numbers and number not in absent]
    if missing:
        fix = "Correct them, or pass absent=[...] for layers that other ranks hold."
        found = f"layers {', '.join(map(str, sorted(numbers)[:20]))}"
        raise TreeError(error_text(f"{doing}: no such layers of {prefix!r}", found=found, offenders=missing, fix=fix))
    return matches


def _is_one(text: str, numbers: Collection[int]) -> bool:
    return len(text) <= _MOST_DIGITS and int(text) in numbers


def _renumbered(tree: Flat, form: KeyForm, layers: Sequence[int]) -> dict[str, list[tuple[str, Any]]]:
    """Return the leaves that replace each leaf of a layer: a list of (entry, leaf) by the old leaf's entry.

    The list has a leaf for each position of the layer's number in `layers`; the position is the new number. An empty
    list means that the layer isn't kept.
    """
    new: dict[str, list[tuple[str, Any]]] = {}
    places = defaultdict[int, list[int]](list)
    for place, layer in enumerate(layers):
        places[layer].append(place)
    for entry, leaf in tree.items():
        match = form.match(leaf.key) if isinstance(leaf, ShardedBase) else None
        if match is not None:
            *_, number, suffix = match
            head, old_number = leaf.key.removesuffix(f".{number}{suffix}"), _number("keep_layers", number)
            keys = [f"{head}.{place}{suffix}" for place in places.get(old_number, ())]
            leaves = [leaf if key == leaf.key else replace(leaf, key=key) for key in keys]
            new[entry] = [(renamed(entry, leaf, new_leaf), new_leaf) for new_leaf in leaves]
    return new


def _no_match(doing: str, expected: str, tree: Flat) -> TreeError:
    keys = [repr(shard.key) for shard in flat_tensors(tree).values()]
    found = ", ".join(shorten(keys, shown=3)) or "no tensors"
    return TreeError(error_text(f"{doing}: no key matches", found=found, expected=expected))


# Renaming by patterns.

SameTree = TypeVar("SameTree")


def partial_rename(tree: SameTree, names: Mapping[str, str]) -> SameTree:
    """Return the tree with shard keys renamed by patterns; other keys stay, and so does the tree's structure.

    States and groups of renamed parameters, found as in `keep_layers`, are renamed too, unless a pattern matches a
    state's own key.

    Args:
        tree: Any tree.
        names: New key for each old one. Each ``*`` matches one part between dots, which replaces the new key's ``*``
            in the same position. The first pattern that matches a key counts.

    Raises:
        MetadataError: `names` isn't a mapping.
        TreeError: A pattern matches no key, patterns have different numbers of stars, two keys would become one, or a
            state can't follow its parameter.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> shard = ShardedTensor.from_rank_offsets("decoder.layers.3.linear_fc2.weight", torch.ones(2))
        >>> partial_rename([shard], {"decoder.layers.*.linear_fc2.weight": "model.layers.*.down_proj.weight"})[0].key
        'model.layers.3.down_proj.weight'
    """
    check_type("partial_rename", "names", names, Mapping, "Pass {old pattern: new pattern}; `rename` takes functions.")
    for old, new in names.items():
        check_stars("partial_rename", old, [new])
    keys = {leaf.key for _, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedBase)}
    matches = match_keys("partial_rename", names, keys)
    new_keys = {key: fill_key(names[pattern], parts) for key, (pattern, parts) in matches.items()}
    of_states = renamed_states("partial_rename", keys, new_keys)
    renamed_tree = rename(tree, new_keys | of_states)
    changed = {leaf.key: leaf for leaf in shard_leaves(tree) if new_keys.get(leaf.key, leaf.key) != leaf.key}

    def change(flat: Flat) -> dict[str, Any]:
        return {
            entry: replace(leaf, key=new_keys[leaf.key]) if entry in changed else leaf for entry, leaf in flat.items()
        }

    new_tree, wrong = renamed_in_groups(
        NamedParameters(changed, key_ends(keys - of_states.keys()), change), renamed_tree
    )
    if wrong:
        raise stuck("partial_rename", wrong)
    result: SameTree = new_tree
    return result
