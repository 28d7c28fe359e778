"""Lenses that change only under which key, and as whose copy, a tensor is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import MetadataError, TreeError, error_text
from ...geometry import refuse
from ...mapping import ReplicaId, ShardedTensor
from ...trees import match_key
from ._boxes import check_box
from ._lens import Built, Lens
from ._names import check_names, replaced_part
from ._patterns import checked_lenses


def renamed(part: str, name: str) -> Lens:
    """Return the lens that stores a tensor under another key.

    Args:
        part: what of the key is replaced, with dots between where it is more than one name.
        name: what stands there instead.

    Raises:
        TreeError: a name isn't a text, or the key has no such part.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.decoder.norm.weight", torch.zeros(2))
        >>> renamed("decoder.norm", "model.norm")(shard).shards[0].key
        'optimizer.state.exp_avg.model.norm.weight'
    """
    check_names("renamed", part, [name], 1)
    return lambda shard: _as_it_is("renamed", shard, replaced_part("renamed", shard.key, part, name), shard.replica_id)


def tied(part: str, name: str) -> Lens:
    """Return the lens of a tensor that is a copy of another one: it is stored as a replica under that one's key.

    So both are stored once, and each is loaded where it is held, on other pipeline stages too. Nothing compares the
    two: as with all replicas, any of them may be written, and it is the model that keeps them equal.

    Args:
        part: what of the key is replaced.
        name: what stands there in the other one's key; ``tied("output_layer", "embedding.word_embeddings")``, say.

    Raises:
        TreeError: a name isn't a text, or the key has no such part.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("output_layer.weight", torch.zeros(2))
        >>> [stored] = tied("output_layer", "embedding")(shard).shards
        >>> stored.key, stored.replica_id
        ('embedding.weight', (1, 0))
    """
    check_names("tied", part, [name], 1)
    return lambda shard: _as_it_is("tied", shard, replaced_part("tied", shard.key, part, name), _copy(shard.replica_id))


def _copy(replica_id: ReplicaId) -> ReplicaId:
    return (1, *(replica_id if isinstance(replica_id, tuple) else (replica_id,)))


def _as_it_is(doing: str, shard: ShardedTensor, key: str, replica_id: ReplicaId) -> Built:
    check_box(doing, shard)
    return Built((replace(shard, key=key, replica_id=replica_id),), _only)


def _only(parts: Sequence[Any]) -> Any:
    return parts[0]


def lenses_by_pattern(lenses: Mapping[str, Lens | None]) -> Lens:
    """Return the lens that chooses by the key, as where `attention_qkv` stores apart what differs from there on.

    Args:
        lenses: pattern -> lens, or None where a tensor stays as it is; ``*`` stands for one part between dots of a key,
            ``**`` for any number. The first one that fits the key, or what is behind some of its dots, counts: so a
            state's key goes the way of its parameter's.

    Raises:
        MetadataError: there are no patterns, or one has no lens.
        TreeError: no pattern fits a key.

    Examples:
        >>> import torch
        >>> from shardtree.transforms import rotary_halves
        >>> lens = lenses_by_pattern({"**.q.**": rotary_halves(head_size=4), "**.v.**": None})
        >>> for key in ("h.0.q.weight", "h.0.v.weight"):
        ...     lens(ShardedTensor.from_rank_offsets(key, torch.arange(4))).shards[0].data
        tensor([0, 2, 1, 3])
        tensor([0, 1, 2, 3])
    """
    known = checked_lenses("lenses_by_pattern", lenses)
    if not known:
        fix = "Pass a lens for each pattern of keys."
        refuse("lenses_by_pattern", "lenses", "none", "patterns and lenses", fix, error=MetadataError)

    def lens(shard: ShardedTensor) -> Built:
        pattern = next((each for each in known if _fits(each, shard.key)), None)
        if pattern is None:
            fix = 'Add it, with None where the tensor stays as it is; {"**": None} fits all keys.'
            what = f"lenses_by_pattern: no pattern fits {shard.key!r}"
            raise TreeError(error_text(what, expected=", ".join(map(repr, known)), fix=fix))
        chosen = known[pattern]
        return Built((shard,), _only) if chosen is None else chosen(shard)

    return lens


def _fits(pattern: str, key: str) -> bool:
    return match_key(pattern if pattern.startswith("**") else f"**.{pattern}", key) is not None
