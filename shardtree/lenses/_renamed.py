"""Lenses that change only the key or replica id under which a tensor is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.geometry import refuse
from ..core.mapping import ReplicaId, ShardedTensor
from ..core.trees import match_key
from ..errors import MetadataError, TreeError, error_text
from ._lens import Lens, StoredForm, check_box, checked_lenses

# Replacing a part of a key, which works for optimizer states' keys too.


def replaced_part(doing: str, key: str, part: str, name: str) -> str:
    """Return a key with one part, or several adjacent ones, replaced.

    Args:
        doing: Name of the caller in errors.
        key: Key made of names between dots.
        part: Name in the key, or several adjacent ones with dots between them.
        name: Replacement.

    Raises:
        TreeError: The key doesn't have the part exactly once.

    Examples:
        >>> replaced_part("gate_and_up", "optimizer.state.exp_avg.layers.0.fc1.weight", "fc1", "up_proj")
        'optimizer.state.exp_avg.layers.0.up_proj.weight'
    """
    # Dots at both ends keep a part from matching within a name.
    whole = f".{key}."
    count = sum(whole.startswith(f".{part}.", at) for at in range(len(whole)))
    if count != 1:
        fix = "Pass a part= that occurs once in the key: one name, or adjacent names, as in 'decoder.layers'."
        heading = f"{doing}: {part!r} does not occur exactly once in the key {key!r}"
        raise TreeError(error_text(heading, found=f"{count} occurrences", expected="one", fix=fix))
    return whole.replace(f".{part}.", f".{name}.", 1)[1:-1]


def check_names(doing: str, part: str | None, names: Sequence[str] | None, count: int) -> None:
    """Raise an error if a lens can't name its stored tensors with the arguments `part` and `names`.

    Args:
        doing: Name of the lens in errors.
        part: Part of the key that the names replace; None if `names` is None.
        names: Names of the stored tensors, all different; None if one tensor is stored under the same key.
        count: Required number of names.

    Raises:
        TreeError: Only one of `part` and `names` is None, a text is empty, or `names` isn't `count` different strings.

    Examples:
        >>> check_names("gate_and_up", "fc1", ("gate_proj", "up_proj"), 2)
    """
    if part is None and names is None:
        return
    words = [names] if isinstance(names, str) else list(names or ())
    texts = [part, *words]
    is_sound = isinstance(names, Sequence) and not isinstance(names, str)
    if not (
        is_sound and all(isinstance(text, str) and text for text in texts) and len(set(words)) == len(words) == count
    ):
        found = f"part={part!r}, names={names!r}"[:300]
        new = "a name" if count == 1 else f"{count} different names"
        fix = "Pass both, or leave out both to keep the key." if part is None or names is None else None
        expected = f"a part of the key, and {new} to replace it"
        raise TreeError(error_text(f"{doing}: unusable part= or names=", found=found, expected=expected, fix=fix))


def renamed(part: str, name: str) -> Lens:
    """Return the lens that stores a tensor under another key.

    Args:
        part: Name in the key that is replaced, or several adjacent ones with dots between them.
        name: Replacement.

    Raises:
        TreeError: `part` or `name` is not a string or is empty, or the key does not have the part exactly once.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.decoder.norm.weight", torch.zeros(2))
        >>> renamed("decoder.norm", "model.norm")(shard).shards[0].key
        'optimizer.state.exp_avg.model.norm.weight'
    """
    check_names("renamed", part, [name], 1)
    return lambda shard: _with_key("renamed", shard, replaced_part("renamed", shard.key, part, name), shard.replica_id)


def tied(part: str, name: str) -> Lens:
    """Return the lens of a tensor tied to another tensor: it is stored as a replica under the other tensor's key.

    Their values are stored once and loaded into both tensors, also on different pipeline stages. Nothing compares the
    two: as with all replicas, either may be written, and the model keeps them equal.

    Args:
        part: Part of the key that is replaced.
        name: Replacement, which gives the other tensor's key, as in
            ``tied("output_layer", "embedding.word_embeddings")``.

    Raises:
        TreeError: `part` or `name` is not a string or is empty, or the key does not have the part exactly once.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("output_layer.weight", torch.zeros(2))
        >>> [stored] = tied("output_layer", "embedding")(shard).shards
        >>> stored.key, stored.replica_id
        ('embedding.weight', (1, 0))
    """
    check_names("tied", part, [name], 1)

    def lens(shard: ShardedTensor) -> StoredForm:
        replica = shard.replica_id if isinstance(shard.replica_id, tuple) else (shard.replica_id,)
        # A leading 1 makes every replica of the copy a replica of the other tensor: none of them is the main one.
        return _with_key("tied", shard, replaced_part("tied", shard.key, part, name), (1, *replica))

    return lens


def _with_key(doing: str, shard: ShardedTensor, key: str, replica_id: ReplicaId) -> StoredForm:
    check_box(doing, shard)
    return StoredForm((replace(shard, key=key, replica_id=replica_id),), _the_part)


def _the_part(parts: Sequence[Any]) -> Any:
    return parts[0]


def by_pattern(lenses: Mapping[str, Lens | None]) -> Lens:
    """Return the lens that applies one of several lenses: the first whose pattern matches the tensor's key.

    After `attention_qkv`, for example, queries, keys and values may get different lenses.

    Args:
        lenses: Lens for each pattern of keys; None for tensors that stay unchanged. ``*`` matches one part between dots
            of a key, ``**`` any number of parts. A pattern may leave out the first parts of a key, so an optimizer's
            state gets the lens of its parameter.

    Raises:
        MetadataError: There are no patterns, or a value isn't a lens.
        TreeError: When the lens is applied: no pattern matches the key.

    Examples:
        >>> import torch
        >>> from shardtree.lenses import rotary_halves
        >>> lens = by_pattern({"**.q.**": rotary_halves(head_size=4), "**.v.**": None})
        >>> for key in ("h.0.q.weight", "h.0.v.weight"):
        ...     lens(ShardedTensor.from_rank_offsets(key, torch.arange(4))).shards[0].data
        tensor([0, 2, 1, 3])
        tensor([0, 1, 2, 3])
    """
    lenses = checked_lenses("by_pattern", lenses)
    if not lenses:
        fix = "Pass a lens for each pattern of keys."
        refuse("by_pattern", "lenses", "none", "patterns and lenses", fix, error=MetadataError)

    def lens(shard: ShardedTensor) -> StoredForm:
        pattern = next((each for each in lenses if _fits(each, shard.key)), None)
        if pattern is None:
            fix = 'Add a pattern for it, with None in place of a lens for no change; {"**": None} matches all keys.'
            heading = f"by_pattern: no pattern matches {shard.key!r}"
            raise TreeError(error_text(heading, found=", ".join(map(repr, lenses)), fix=fix))
        inner = lenses[pattern]
        return StoredForm((shard,), _the_part) if inner is None else inner(shard)

    return lens


def _fits(pattern: str, key: str) -> bool:
    return match_key(pattern if pattern.startswith("**") else f"**.{pattern}", key) is not None
