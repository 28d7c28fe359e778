"""What a rank's shards are as entries of its data files, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from ...codec import check_storable, encode_tree, format_tag, is_tagged
from ...errors import CheckpointingException
from ...geometry import Column, box_column, volumes
from ...mapping import ShardedObject, ShardedTensor

Shard: TypeAlias = ShardedTensor | ShardedObject
Source: TypeAlias = ShardedTensor | bytes


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Shards on their way into files, one a row.

    Attributes:
        sources: where each one's bytes come from: a tensor shard, or an object's encoded data.
        number: its position among the rank's shards, int64 (entries,).
        keys: the tensors' keys and the objects' unique keys.
        tags: safetensors' dtypes.
        shapes: as the files' headers have them.
        item_size: what the first byte of each should be a multiple of, int64 (entries,).
        length: in bytes, int64 (entries,).
    """

    sources: tuple[Source, ...]
    number: Column
    keys: tuple[str, ...]
    tags: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    item_size: Column
    length: Column

    def __len__(self) -> int:
        return len(self.sources)


def entries_of(shards: Sequence[Shard], *, allow_pickle: bool) -> Entries:
    """Return shards as entries, in the order given.

    Args:
        shards: tensor shards with data, and objects.
        allow_pickle: whether objects that the codec can't hold are pickled.

    Raises:
        UnsupportedValue: a dtype or an object can't be stored.
    """
    _check_dtypes([shard for shard in shards if isinstance(shard, ShardedTensor)])
    sources = tuple([shard if isinstance(shard, ShardedTensor) else _payload(shard, allow_pickle) for shard in shards])
    # An object is a tensor of its bytes.
    dtypes = [torch.uint8 if isinstance(source, bytes) else source.dtype for source in sources]
    shapes = [(len(source),) if isinstance(source, bytes) else _shape(source) for source in sources]
    keys = tuple([shard.key if isinstance(shard, ShardedTensor) else shard.unique_key for shard in shards])
    different = set(dtypes)
    tag = {dtype: format_tag(dtype) for dtype in different}
    item_size = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)
    length = volumes(box_column(shapes, fill=1)) * item_size
    if not all(map(is_tagged, different)):
        lengths = zip(dtypes, shapes, length.tolist(), strict=True)
        shapes = [shape if is_tagged(dtype) else (nbytes,) for dtype, shape, nbytes in lengths]
    tags = tuple([tag[dtype] for dtype in dtypes])
    return Entries(sources, np.arange(len(shards)), keys, tags, tuple(shapes), item_size, length)


def select_entries(entries: Entries, rows: Column) -> Entries:
    """Return the given rows of entries, in the order given."""
    numbers = rows.tolist()
    return Entries(
        sources=tuple([entries.sources[row] for row in numbers]),
        number=entries.number[rows],
        keys=tuple([entries.keys[row] for row in numbers]),
        tags=tuple([entries.tags[row] for row in numbers]),
        shapes=tuple([entries.shapes[row] for row in numbers]),
        item_size=entries.item_size[rows],
        length=entries.length[rows],
    )


def _check_dtypes(tensors: Sequence[ShardedTensor]) -> None:
    for dtype in dict.fromkeys([shard.dtype for shard in tensors]):
        check_storable(dtype, f"save: {next(shard.key for shard in tensors if shard.dtype == dtype)!r}")


def _payload(item: ShardedObject, allow_pickle: bool) -> bytes:
    try:
        return encode_tree(item.data, allow_pickle=allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the data of ShardedObject {item.unique_key!r}")
        raise


def _shape(shard: ShardedTensor) -> tuple[int, ...]:
    flat = shard.flattened_range
    return (1,) * shard.prepend_axis_num + shard.local_shape if flat is None else (flat.stop - flat.start,)
