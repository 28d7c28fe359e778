"""What one rank's data files look like: which entry lies where, before a byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

from ...codec import Entry, check_storable, encode_header, encode_tree, format_tag, is_tagged
from ...errors import CheckpointingException
from ...mapping import ShardedObject, ShardedTensor
from ...plans import grouped

HEADER_BYTES = 64 * 1024 * 1024
"""A new part begins before a header passes this; readers of safetensors refuse headers of over 100 MB."""

FILE_BYTES = 64 * 1024 * 1024
"""Less isn't worth a file, and a thread that writes it, of its own."""

Shard = ShardedTensor | ShardedObject


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A shard on its way into a file.

    Attributes:
        number: its position among the rank's shards.
        shard: the tensor shard; None for an object.
        payload: an object's encoded data; None for a tensor.
        key: the tensor's key or the object's unique key.
        tag: safetensors' dtype.
        shape: as the file's header has it.
        item_size: what the entry's first byte should be a multiple of.
        length: in bytes.
    """

    number: int
    shard: ShardedTensor | None
    payload: bytes | None
    key: str
    tag: str
    shape: tuple[int, ...]
    item_size: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One data file: its header, then its items, one after the other.

    Attributes:
        header: the file's first bytes.
        items: in the order in which they lie in the file.
        bytes_before: where each item begins in the file.
    """

    header: bytes
    items: tuple[Item, ...]
    bytes_before: tuple[int, ...]

    @property
    def length(self) -> int:
        """The file's length in bytes."""
        return self.bytes_before[-1] + self.items[-1].length if self.items else len(self.header)


def parts(
    shards: Sequence[Shard], *, allow_pickle: bool, most_files: int = 1, header_bytes: int = HEADER_BYTES
) -> tuple[Part, ...]:
    """Return the data files that a rank writes for its shards; none if it has nothing to write.

    Args:
        shards: tensor shards with data, and objects.
        allow_pickle: whether objects that the codec can't hold are pickled.
        most_files: over so many, of about the same length, large shards are spread; headers may ask for more.
        header_bytes: the most that a header may take.

    Raises:
        UnsupportedValue: a dtype or an object can't be stored.
    """
    items = [_item(number, shard, allow_pickle) for number, shard in enumerate(shards)]
    # Falling item sizes keep every entry aligned to its items without gaps, which the format forbids.
    ordered = sorted(items, key=lambda item: (-item.item_size, item.key, item.number))
    files = min(most_files, sum(item.length for item in ordered) // FILE_BYTES)
    return tuple(_part(group) for share in _shares(ordered, files) for group in _groups(share, header_bytes))


def part_name(save_id: str, rank: int, ranks: int, part: int) -> str:
    """Return the name of a rank's data file.

    Examples:
        >>> part_name("save-1", 0, 4, 0), part_name("save-1", 3, 4, 2)
        ('save-1/00000-of-00004.safetensors', 'save-1/00003-of-00004-2.safetensors')
    """
    suffix = f"-{part}" if part else ""
    return f"{save_id}/{rank:05d}-of-{ranks:05d}{suffix}.safetensors"


def _item(number: int, shard: Shard, allow_pickle: bool) -> Item:
    if isinstance(shard, ShardedObject):
        payload = _payload(shard, allow_pickle)
        return Item(number, None, payload, shard.unique_key, "U8", (len(payload),), 1, len(payload))
    check_storable(shard.dtype, f"save: {shard.key!r}")
    shape = _shape(shard)
    length = _elements(shape) * shard.dtype.itemsize
    stored_shape = shape if is_tagged(shard.dtype) else (length,)
    return Item(number, shard, None, shard.key, format_tag(shard.dtype), stored_shape, shard.dtype.itemsize, length)


def _payload(item: ShardedObject, allow_pickle: bool) -> bytes:
    try:
        return encode_tree(item.data, allow_pickle=allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the data of ShardedObject {item.unique_key!r}")
        raise


def _shape(shard: ShardedTensor) -> tuple[int, ...]:
    if shard.flattened_range is not None:
        return (shard.flattened_range.stop - shard.flattened_range.start,)
    return (1,) * shard.prepend_axis_num + shard.local_shape


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _shares(items: Sequence[Item], files: int) -> Iterator[list[Item]]:
    """Yield items, in order, in at most so many groups of about as many bytes: each goes where its middle lies."""
    if files < 2:
        yield list(items)
        return
    ends = list(accumulate(item.length for item in items))
    middles = (2 * end - item.length for item, end in zip(items, ends, strict=True))
    file = [min(middle * files // (2 * ends[-1]), files - 1) for middle in middles]
    for _, group in groupby(zip(file, items, strict=True), key=itemgetter(0)):
        yield [item for _, item in group]


def _groups(items: Sequence[Item], header_bytes: int) -> Iterator[list[Item]]:
    # A character takes at most six bytes in JSON; 200 leaves room for the numbers of a shape and the offsets.
    return grouped(items, lambda item: 6 * len(item.key) + 24 * len(item.shape) + 200, header_bytes)


def _part(items: Sequence[Item]) -> Part:
    names: set[str] = {"__metadata__"}
    entries, offset = [], 0
    for position, item in enumerate(items):
        name = _free_name(item.key, position, names)
        names.add(name)
        entries.append(Entry(name, item.tag, item.shape, offset, offset + item.length))
        offset += item.length
    header = encode_header(entries, {"format": "pt"})
    return Part(header, tuple(items), tuple(len(header) + entry.start for entry in entries))


def _free_name(key: str, position: int, taken: set[str]) -> str:
    name, number = key, position
    while name in taken:
        name, number = f"{key}#{number}", number + 1
    return name
