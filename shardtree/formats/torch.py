"""The common state as Megatron-Core stores it: ``common.pt``, an archive of torch.save, without the shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import (
    CheckpointingException,
    CorruptCheckpoint,
    TreePath,
    UnsafeFile,
    UnsupportedValue,
    error_text,
    render_path,
)
from ..kit import (
    HOLE,
    Buffer,
    Checkpoint,
    Damage,
    Field,
    Fields,
    Finding,
    LoadOptions,
    PendingSave,
    collector_paused,
    leaves_with_paths,
    map_sharing,
    opened,
    refuse_replaced,
    span_findings,
    without_holes,
)
from .archives import add_record, archive_records, decode_archive, encode_archive, find_record
from .manifest import check_listed
from .pickles import read_pickle, write_pickle

# Holes in lists and tuples: empty dicts are stored in their place, and a record lists where they were

_HOLES = ".shardtree_holes"
"""The archive's record of the places in lists and tuples where shards were; other readers pass it over."""


def filled(common: Any) -> tuple[Any, list[TreePath]]:
    """Return a common tree without holes, and the paths at which an empty dict replaces one.

    Examples:
        >>> filled({"w": HOLE, "groups": [HOLE, {"lr": 0.1}]})
        ({'groups': [{}, {'lr': 0.1}]}, [('groups', 0)])
    """
    left = without_holes(common)
    paths = [path for path, leaf in leaves_with_paths(left) if leaf is HOLE]
    return map_sharing(_empty, left), paths


def _empty(leaf: Any) -> Any:
    return {} if leaf is HOLE else leaf


def with_holes(tree: Any, paths: Sequence[TreePath], what: str) -> Any:
    """Return the tree with holes at these paths; lists and dicts are changed in place.

    Args:
        tree: just read, so that nobody else holds it.
        paths: Paths that `filled` returned.
        what: the file, for messages.

    Raises:
        CorruptCheckpoint: there is no empty dict at one of the paths.

    Examples:
        >>> with_holes({"groups": ({}, 1)}, [("groups", 0)], "example")
        {'groups': (HOLE, 1)}
    """
    for path in paths:
        try:
            tree = _put(tree, path)
        except (LookupError, TypeError) as error:
            found = f"no empty dict at {render_path(path)}"[:200]
            raise CorruptCheckpoint(error_text(f"{what}: its record of shards contradicts it", found=found)) from error
    return tree


def _put(tree: Any, path: TreePath) -> Any:
    if not path:
        if type(tree) is not dict or tree:
            raise LookupError
        return HOLE
    entry, inner = path[0], _put(tree[path[0]], path[1:])
    if not isinstance(tree, tuple):
        tree[entry] = inner
        return tree
    return tuple.__new__(type(tree), [inner if position == entry else item for position, item in enumerate(tree)])


def encode_with_holes(tree: Any, *, allow_pickle: bool) -> bytes:
    """Return torch.save's archive of a tree, with a record of the holes in lists and tuples.

    Raises:
        UnsupportedValue: a value would have to be pickled, and `allow_pickle` isn't given.
    """
    plain, holes = filled(tree)
    data = encode_archive(plain, allow_pickle=allow_pickle)
    return add_record(data, _HOLES, encode_holes(holes)) if holes else data


def decode_with_holes(data: Buffer, what: str, options: LoadOptions) -> Any:
    """Return the tree that `encode_with_holes` was given, or that another program saved.

    Raises:
        CorruptCheckpoint: the bytes aren't what was saved.
        UnsafeFile: reading it takes pickled code, and `allow_pickle` isn't given.
    """
    with collector_paused():
        tree = decode_archive(data, what=what, types=options.types, allow_pickle=options.allow_pickle)
    holes = find_record(data, _HOLES, what=what)
    return tree if holes is None else with_holes(tree, decode_holes(holes, what), what)


def encode_holes(paths: Sequence[TreePath]) -> bytes:
    """Return paths as bytes.

    Raises:
        UnsupportedValue: a dict's key on a path isn't a number, a string or a tuple of them.
    """
    # Others' programs read the file too: it has a field's position.
    return write_pickle([tuple(int(entry) if isinstance(entry, Field) else entry for entry in path) for path in paths])


def decode_holes(data: bytes, what: str) -> list[TreePath]:
    """Return the paths that `encode_holes` was given.

    Raises:
        CorruptCheckpoint: the bytes aren't of paths.
    """
    paths = read_pickle(data, {}, what=f"{what}: its record of shards")
    if type(paths) is not list or any(type(path) is not tuple or len(path) > 200 for path in paths):
        raise CorruptCheckpoint(error_text(f"{what}: its record of shards isn't a list of paths"))
    return paths


BACKEND, VERSION = "torch", 1

COMMON_FILE = "common.pt"


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Write the common tree, and return the fields of metadata.json that name its format.

    Raises:
        UnsupportedValue: a value would have to be pickled, and `allow_pickle` isn't given.
    """
    # A dict's key is left out where a shard was, as in Megatron-Core. It leaves shards out of lists too, and what
    # follows gets another position: here an empty dict keeps the place. Megatron-Core's `load` joins that with a dict
    # of shards, and refuses to join it with anything else.
    data = encode_with_holes(common, allow_pickle=pending.options.allow_pickle)
    pending.storage.write(COMMON_FILE, [memoryview(data)], durable=pending.options.durable)
    return {"common_backend": BACKEND, "common_backend_version": VERSION}


def load_common(checkpoint: Checkpoint) -> Any:
    """Return the stored common tree, with holes where lists and tuples had shards.

    Raises:
        CorruptCheckpoint: there is no such file, or it isn't what was saved.
        UnsafeFile: reading it takes pickled code, and `allow_pickle` isn't given.
    """
    return load_archive(checkpoint, COMMON_FILE)


def load_archive(checkpoint: Checkpoint, name: str) -> Any:
    """Return the tree in one of a checkpoint's files; it raises as `load_common`."""
    data, what = _read(checkpoint, name)
    return decode_with_holes(data, what, checkpoint.options)


def verify_common(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return whether common.pt is damaged."""
    return verify_archive(checkpoint, COMMON_FILE)


def verify_archive(checkpoint: Checkpoint, name: str) -> tuple[Finding, ...]:
    """Return whether one of a checkpoint's files is damaged: a checksum differs, or it can't be read at all."""
    try:
        data, what = _read(checkpoint, name)
        with suppress(UnsafeFile, UnsupportedValue):  # its checksums are right; nobody asks for its values here
            decode_with_holes(data, what, checkpoint.options)
    except CorruptCheckpoint as error:
        return (Damage(name, str(error)),)
    checkpoint.options.progress(data.nbytes)
    return archive_findings(name, data)


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the name of the one file."""
    return (COMMON_FILE,)


def _read(checkpoint: Checkpoint, name: str) -> tuple[Buffer, str]:
    where = checkpoint.storage.where(name)
    if (length := checkpoint.storage.length(name)) is None:
        refuse_replaced(checkpoint)
        fix = "The save wasn't finished, or the file was removed; load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: the common state {where!r} isn't there", fix=fix))
    if checkpoint.options.verify is not None:
        check_listed(checkpoint, name)
    with opened(checkpoint.storage, name, length) as reader:
        return reader.read(), where


# A single archive of torch.save: which of its bytes have a CRC32

HEADERS = "headers, names and padding of zip archives: compared where they say a thing twice"


def archive_findings(name: str, data: Buffer) -> tuple[Finding, ...]:
    """Return findings for the bytes of a sound archive that have a CRC32, and for those that have none.

    Args:
        name: Name of the archive's file.
        data: Content of the file.
    """
    try:
        records = archive_records(lambda begin, end: data[begin:end], data.nbytes, what=name)
    except CheckpointingException:
        records = ()  # torch wrote it in another form, which has no checksums
    spans = ((record.begin, record.begin + record.nbytes) for record in records if record.crc32)
    return span_findings(name, HEADERS, data.nbytes, spans)
