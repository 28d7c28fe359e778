"""The identity of a conversion: the source's bytes, the format, and how each piece is made of the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...codec import canonical_json, dtype_name, encode_tree, row_major_bits
from ...errors import CheckpointingException
from ...lazy import LazyTensor
from ...mapping import ShardedObject, ShardedTensor
from ...storage import digest, file_lengths, listed
from ...strategies import Checkpoint
from .._dispatch import Backends
from ..opened import StoredBoxes
from ._plan import Batch
from ._source import StoredObject

_VERSION = 1  # of the journal and of what is hashed here


def conversion_digest(
    source: Checkpoint, backends: Backends, batches: Sequence[Batch], *, nonce: str, allow_pickle: bool
) -> str:
    """Return the hash of a conversion: two with the same one write the same files.

    Tensors and objects that a transform has made itself are hashed by value.

    Args:
        source: what is converted.
        backends: of the destination.
        batches: what is written.
        nonce: another one in each call, and the same on all its ranks: the hash of what can't be hashed.
        allow_pickle: whether values are pickled.
    """
    known: dict[int, str] = {}
    listed = [
        [_tensor(shard, known, nonce) for shard in batch.tensors]
        + [_object(item, nonce, allow_pickle) for item in batch.objects]
        for batch in batches
    ]
    return digest(canonical_json([_VERSION, _identity(source), backends, allow_pickle, listed]))


def _identity(source: Checkpoint) -> Any:
    """Return a checkpoint's own digest, or else the names, lengths and times of change of its files."""
    known = source.fields.get("digest")
    if isinstance(known, str):
        return known
    with listed(source.storage) as seen:
        files = [(name, length, str(seen.changed(name))) for name, length in file_lengths(seen)]
    return [source.storage.where(), *files]


def _tensor(shard: ShardedTensor, known: dict[int, str], nonce: str) -> Any:
    place = (shard.global_shape, shard.global_offset, shard.local_shape, shard.prepend_axis_num)
    fragments = shard.axis_fragmentations
    return [shard.key, dtype_name(shard.dtype), place, fragments, _data(shard.data, known, nonce)]


def _data(data: Any, known: dict[int, str], nonce: str) -> Any:
    if isinstance(data, LazyTensor):
        return [tuple(data.place), [dtype_name(cast) for cast in data.casts], _source(data.source, known, nonce)]
    return digest(memoryview(row_major_bits(data).numpy()))


def _source(source: Any, known: dict[int, str], nonce: str) -> str:
    """Return the hash of what a lazy tensor is a view of, computed once for all views."""
    if id(source) not in known:
        made_of = source.made_of
        # A caller's function can't be hashed: such a conversion begins anew each time.
        made = [nonce] if made_of is None else [_part(part, known, nonce) for part in made_of]
        known[id(source)] = digest(canonical_json([source.shape, dtype_name(source.dtype), *made, *_origin(source)]))
    return known[id(source)]


def _part(part: Any, known: dict[int, str], nonce: str) -> Any:
    return _data(part, known, nonce) if isinstance(part, LazyTensor) else part


def _origin(source: Any) -> list[Any]:
    """Return the identity of another checkpoint, if a transform reads this tensor from one."""
    reader = getattr(source, "reader", None)
    return [_identity(reader.tree.checkpoint)] if isinstance(reader, StoredBoxes) else []


def _object(item: ShardedObject, nonce: str, allow_pickle: bool) -> Any:
    if isinstance(item.data, StoredObject):
        return [item.unique_key, item.data.unique_key]
    try:
        return [item.unique_key, digest(encode_tree(item.data, allow_pickle=allow_pickle))]
    except CheckpointingException:
        return [item.unique_key, nonce]  # can't be hashed: equal to nothing, so it's written anew
