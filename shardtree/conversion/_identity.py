"""The identity of a conversion: the source, and the derivation of each written piece from it.

The journal's name is a hash of this identity and of the format, so that only an equal conversion resumes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.codec import canonical_json, dtype_name, encode_tree, row_major_bits
from ..core.lazy import LazyTensor
from ..core.mapping import ShardedObject, ShardedTensor
from ..errors import CheckpointingException
from ..inspection import StoredBoxes
from ..shell.storage import digest, file_lengths, listed
from ..shell.table import Checkpoint
from ._plan import Batch
from ._source import StoredObject


def contents_of(batches: Sequence[Batch], *, nonce: str, allow_pickle: bool) -> list[Any]:
    """Return a JSON value for each batch, which is equal in two calls only if the tensors and objects are.

    Args:
        batches: Batches to write.
        nonce: Text that is new in each call; it stands for values that can't be hashed, so that they equal no others.
        allow_pickle: Whether values may be pickled.
    """
    hashes: dict[int, str] = {}
    return [
        [_tensor(shard, hashes, nonce) for shard in batch.tensors]
        + [_object(item, nonce, allow_pickle) for item in batch.objects]
        for batch in batches
    ]


def common_hash(common: Any) -> str:
    """Return the hash of a common state; empty if `encode_tree` can't encode it without pickles.

    Pickles aren't hashed, since pickles of equal sets differ between processes.
    """
    try:
        return digest(encode_tree(common))
    except CheckpointingException:
        return ""


def source_of(source: Checkpoint) -> Any:
    """Return a source's identity: its recorded digest, or else its path and its files' names, lengths and times."""
    own_digest = source.fields.get("digest")
    if isinstance(own_digest, str):
        return own_digest
    with listed(source.storage) as listing:
        files = [(name, length, str(listing.changed(name))) for name, length in file_lengths(listing)]
    return [source.storage.where(), *files]


def _tensor(shard: ShardedTensor, hashes: dict[int, str], nonce: str) -> Any:
    place = (shard.global_shape, shard.global_offset, shard.local_shape, shard.prepend_axis_num)
    fragments = shard.axis_fragmentations
    return [shard.key, dtype_name(shard.dtype), place, fragments, _data(shard.data, hashes, nonce)]


def _data(data: Any, hashes: dict[int, str], nonce: str) -> Any:
    if isinstance(data, LazyTensor):
        return [tuple(data.place), [dtype_name(cast) for cast in data.casts], _source(data.source, hashes, nonce)]
    return digest(memoryview(row_major_bits(data).numpy()))


def _source(source: Any, hashes: dict[int, str], nonce: str) -> str:
    """Return the hash of a lazy tensor's source; `hashes` memoises it, since many views may share a source."""
    if id(source) not in hashes:
        # A caller's function can't be hashed, so such a conversion isn't resumed.
        parts = [nonce] if source.made_of is None else source.made_of
        inputs = [_data(part, hashes, nonce) if isinstance(part, LazyTensor) else part for part in parts]
        reader = getattr(source, "reader", None)  # set if a transform takes this tensor from another checkpoint
        origin = [source_of(reader.tree.checkpoint)] if isinstance(reader, StoredBoxes) else []
        hashes[id(source)] = digest(canonical_json([source.shape, dtype_name(source.dtype), *inputs, *origin]))
    return hashes[id(source)]


def _object(item: ShardedObject, nonce: str, allow_pickle: bool) -> Any:
    if isinstance(item.data, StoredObject):
        return [item.unique_key, item.data.unique_key]
    try:
        return [item.unique_key, digest(encode_tree(item.data, allow_pickle=allow_pickle))]
    except CheckpointingException:
        return [item.unique_key, nonce]  # can't be hashed: equal to nothing, so it's written anew
