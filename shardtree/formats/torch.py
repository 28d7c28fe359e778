"""Megatron-Core's format of the common state: ``common.pt``, an archive of torch.save without the shards."""

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

# Holes in lists and tuples are stored as empty dicts, and a record lists their paths.

_HOLES = ".shardtree_holes"
"""Name of the archive's record of holes in lists and tuples, which other readers ignore."""

_FIX = "The file was damaged or edited; load another checkpoint."


def filled(common: Any) -> tuple[Any, list[TreePath]]:
    """Return a tree without holes (placeholders of shards), and the paths of holes that became empty dicts.

    Holes in dicts are omitted; holes in lists and tuples become empty dicts.

    Examples:
        >>> filled({"w": HOLE, "groups": [HOLE, {"lr": 0.1}]})
        ({'groups': [{}, {'lr': 0.1}]}, [('groups', 0)])
    """
    tree = without_holes(common)
    paths = [path for path, leaf in leaves_with_paths(tree) if leaf is HOLE]
    return map_sharing(_empty, tree), paths


def _empty(leaf: Any) -> Any:
    return {} if leaf is HOLE else leaf


def with_holes(tree: Any, paths: Sequence[TreePath], what: str) -> Any:
    """Return a tree with holes in place of the empty dicts at some paths; its lists and dicts are changed in place.

    Args:
        tree: Tree that was just read, so that nothing else refers to it.
        paths: Paths that `filled` returned.
        what: Description of the file, for errors.

    Raises:
        CorruptCheckpoint: A path doesn't lead to an empty dict.

    Examples:
        >>> with_holes({"groups": ({}, 1)}, [("groups", 0)], "example")
        {'groups': (HOLE, 1)}
    """
    for path in paths:
        try:
            tree = _put(tree, path)
        except (LookupError, TypeError) as error:
            cause = f"no placeholder (an empty dict) for a shard at {render_path(path)}"[:200]
            raise CorruptCheckpoint(
                error_text(f"{what}: its list of shard paths does not match its values", found=cause, fix=_FIX)
            ) from error
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
        UnsupportedValue: A value would have to be pickled, and `allow_pickle` isn't given.
    """
    plain, holes = filled(tree)
    data = encode_archive(plain, allow_pickle=allow_pickle)
    return add_record(data, _HOLES, encode_holes(holes)) if holes else data


def decode_with_holes(data: Buffer, what: str, options: LoadOptions) -> Any:
    """Return the tree of an archive that `encode_with_holes` or another program wrote.

    Raises:
        CorruptCheckpoint: The bytes aren't what was saved.
        UnsafeFile: Reading the tree takes pickled code, and `allow_pickle` isn't given.
    """
    with collector_paused():
        tree = decode_archive(data, what=what, types=options.types, allow_pickle=options.allow_pickle)
    holes = find_record(data, _HOLES, what=what)
    return tree if holes is None else with_holes(tree, decode_holes(holes, what), what)


def encode_holes(paths: Sequence[TreePath]) -> bytes:
    """Return the pickle of the paths of holes (marks of missing leaves), which an archive stores as a record.

    Raises:
        UnsupportedValue: A dict's key on a path isn't a number, a string or a tuple of them.
    """
    # A field is stored as its position, since other programs read the file too.
    return write_pickle([tuple(int(entry) if isinstance(entry, Field) else entry for entry in path) for path in paths])


def decode_holes(data: bytes, what: str) -> list[TreePath]:
    """Return the paths of holes from a pickle that `encode_holes` made.

    Raises:
        CorruptCheckpoint: The bytes aren't a list of paths.
    """
    paths = read_pickle(data, {}, what=f"{what}: its list of shard paths")
    if type(paths) is not list or any(type(path) is not tuple or len(path) > 200 for path in paths):
        raise CorruptCheckpoint(error_text(f"{what}: its list of shard paths is malformed", fix=_FIX))
    return paths


BACKEND, VERSION = "torch", 1

COMMON_FILE = "common.pt"


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Write the common tree, and return the fields of metadata.json that name its format.

    Raises:
        UnsupportedValue: A value would have to be pickled, and `allow_pickle` isn't given.
    """
    # Keys of shards are left out of dicts, as in Megatron-Core. Megatron-Core also leaves shards out of lists, which
    # moves later items: here an empty dict keeps the position. Megatron-Core's `load` merges it with a dict of shards,
    # and refuses to merge it with other values.
    data = encode_with_holes(common, allow_pickle=pending.options.allow_pickle)
    pending.storage.write(COMMON_FILE, [memoryview(data)], durable=pending.options.durable)
    return {"common_backend": BACKEND, "common_backend_version": VERSION}


def load_common(checkpoint: Checkpoint) -> Any:
    """Return the stored common tree, with holes where lists and tuples had shards.

    Raises:
        CorruptCheckpoint: The file is missing, or isn't what was saved.
        UnsafeFile: Reading the tree takes pickled code, and `allow_pickle` isn't given.
    """
    return load_archive(checkpoint, COMMON_FILE)


def load_archive(checkpoint: Checkpoint, name: str) -> Any:
    """Return the tree in a file of a checkpoint; raise the same errors as `load_common`."""
    data, what = _read(checkpoint, name)
    return decode_with_holes(data, what, checkpoint.options)


def verify_common(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return the findings about common.pt: damage, or the coverage by checksums."""
    return verify_archive(checkpoint, COMMON_FILE)


def verify_archive(checkpoint: Checkpoint, name: str) -> tuple[Finding, ...]:
    """Return the findings about an archive: damage if it cannot be read, else those of `archive_findings`."""
    try:
        data, what = _read(checkpoint, name)
        with suppress(UnsafeFile, UnsupportedValue):  # The checksums are right, and the values aren't needed here.
            decode_with_holes(data, what, checkpoint.options)
    except CorruptCheckpoint as error:
        return (Damage(name, str(error)),)
    checkpoint.options.progress(data.nbytes)
    return archive_findings(name, data)


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the format's files: only common.pt."""
    return (COMMON_FILE,)


def _read(checkpoint: Checkpoint, name: str) -> tuple[Buffer, str]:
    where = checkpoint.storage.where(name)
    if (length := checkpoint.storage.length(name)) is None:
        refuse_replaced(checkpoint)
        fix = "The save was not finished, or the file was removed; load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: the common state {where!r} is missing", fix=fix))
    if checkpoint.options.verify is not None:
        check_listed(checkpoint, name)
    with opened(checkpoint.storage, name, length) as reader:
        return reader.read(), where


# This section lists the bytes of an archive that have a CRC32.

HEADERS = "headers, names and padding of zip archives: only fields that are stored twice are compared"


def archive_findings(name: str, data: Buffer) -> tuple[Finding, ...]:
    """Return findings about an intact archive: the number of bytes that have a CRC32, and the ranges that have none.

    Args:
        name: Name of the archive's file.
        data: Content of the file.
    """
    try:
        records = archive_records(lambda begin, end: data[begin:end], data.nbytes, what=name)
    except CheckpointingException:
        records = ()  # torch wrote another form of the file, which has no checksums.
    spans = ((record.begin, record.begin + record.nbytes) for record in records if record.crc32)
    return span_findings(name, HEADERS, data.nbytes, spans)
