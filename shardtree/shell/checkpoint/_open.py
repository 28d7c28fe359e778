"""Opening a checkpoint: recognising its formats, and reading its metadata and common state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from ...core.deferred import leaf
from ...core.mapping import ShardedObject, ShardedTensor
from ...errors import CorruptCheckpoint, KeyMismatch, StrategyError, error_text
from ..storage import Directory, Storage, listed, storage_at
from ..table import (
    METADATA_FILE,
    Checkpoint,
    FormatTraits,
    LoadOptions,
    Stamp,
    Strategies,
    StrategyAction,
    deciding_files,
    decode_metadata,
    find_strategy,
    is_deciding,
    is_of_others,
    is_whole,
    metadata_bytes,
    packages,
    stamp,
    table_of,
    traits_of,
    unless_replaced,
    unreplaced,
)
from ..world import World, current_world, on_rank_zero, share, step
from ._dispatch import (
    Choice,
    alike,
    are_objects_beside,
    check_options,
    common_backend,
    sharded_backend,
    strategy_of,
)

Metadata = Mapping[str, ShardedTensor | ShardedObject]
Fields = Mapping[str, Any]
Opening = tuple[Fields, Stamp]
"""Fields and stamp of a checkpoint, which rank 0 sends to the others after it has opened it."""

Read = TypeVar("Read")

CONTENT_METADATA = "content_metadata"


def open_at(directory: Directory, world: World, options: LoadOptions, strategies: Strategies | None) -> Checkpoint:
    """Open a finished checkpoint and return it; not collective.

    Raises:
        NotACheckpoint: the directory holds no finished checkpoint.
        CorruptCheckpoint: metadata.json is damaged.
        StrategyError: `options.verify` has an unknown value.
    """
    storage = find(directory, options)
    # The stamp is taken before the fields, so that reads notice a checkpoint that replaces this one in between.
    decided_by = deciding_files(strategies)
    first_stamp = stamp(storage, decided_by)
    fields = read_fields(storage, strategies)
    traits = traits_together(fields, decided_by, strategies)
    return Checkpoint(storage, fields, world, options, stamp=first_stamp, traits=traits)


def with_opening(checkpoint: Checkpoint, opening: Opening, strategies: Strategies | None) -> Checkpoint:
    """Return this rank's checkpoint, with rank 0's fields of metadata.json and rank 0's stamp of the files.

    Args:
        checkpoint: Checkpoint that this rank has opened.
        opening: Fields and stamp from rank 0. The stamp identifies the state of the files that rank 0 opened.
        strategies: Dispatch table; None for the process's.
    """
    if checkpoint.world.rank == 0:
        return checkpoint
    fields, shared_stamp = opening
    traits = traits_together(fields, deciding_files(strategies), strategies)
    return replace(checkpoint, fields=fields, stamp=shared_stamp, traits=traits)


def traits_together(fields: Fields, decided_by: tuple[str, ...], strategies: Strategies | None) -> FormatTraits:
    """Return the combined traits of a checkpoint's two formats: its shards' and its common state's.

    Args:
        fields: Fields of metadata.json.
        decided_by: Name patterns of the files that make a folder a checkpoint, from `deciding_files`.
        strategies: Dispatch table; None for the process's.
    """
    sharded = traits_of(*sharded_backend(fields), strategies)
    common = traits_of(*common_backend(fields), strategies)
    in_save_folder = sharded.in_save_folder and common.in_save_folder
    check = partial(is_whole, strategies)
    return replace(sharded, decided_by=decided_by, in_save_folder=in_save_folder, is_whole=check)


def find(directory: Directory, options: LoadOptions) -> Storage:
    """Return the storage of a path, URL or storage, after checking the options.

    Raises:
        MetadataError: the options are of another class, or a field isn't a function.
        StrategyError: `options.verify` has an unknown value.
    """
    check_options("open", options, LoadOptions)
    if options.verify not in ("whole", "all", None):
        heading, expected = "open: invalid options.verify", "'whole', 'all' or None"
        raise StrategyError(error_text(heading, found=repr(options.verify)[:200], expected=expected))
    return storage_at(directory)


def read_fields(storage: Storage, strategies: Strategies | None) -> Fields:
    """Return the fields of metadata.json, or equivalent fields if a format recognises a folder without that file.

    A metadata.json without any of our fields belongs to another program, and is ignored if a format is recognised.

    Raises:
        NotACheckpoint: there is no metadata.json, and no format is recognised.
        CorruptCheckpoint: metadata.json is damaged.
    """
    fields = _fields_at(storage, strategies)
    if fields is not None:
        return fields
    if (data := metadata_bytes(storage)) is not None:
        return decode_metadata(data, storage.where(METADATA_FILE))  # raises, since it belongs to another program
    raise leaf("not_a_checkpoint")(storage, partial(_fields_at, strategies=strategies))


def _fields_at(storage: Storage, strategies: Strategies | None) -> Fields | None:
    try:
        if (data := metadata_bytes(storage)) is not None:
            return decode_metadata(data, storage.where(METADATA_FILE))
    except CorruptCheckpoint:
        if _own_metadata(storage) is not None:
            raise
    return recognize(storage, strategies)


def recognize(storage: Storage, strategies: Strategies | None) -> Fields | None:
    """Return fields like those of metadata.json from the first format that recognises a storage; None if none does.

    Formats with an index of their own are tried first: a single safetensors file beside such an index may be an export.
    """
    # Folders of other programs (DCP, Hugging Face) have no metadata.json: formats recognise them by other files.
    with listed(storage, deep=False) as listing:
        names = cache(listing.names)  # called once, and only if no plain name decides
        for of_packages in (False, True):  # packages are imported last, and not for an empty folder
            table = packages().rows if of_packages else table_of(strategies)
            rows = [(traits_of(*row[1:], strategies), row) for row in table if row[0] is StrategyAction.RECOGNIZE]
            rows.sort(key=lambda pair: pair[0].is_guess)
            # Only formats whose deciding files may exist are tried, since a call imports the format.
            answers = (table[row](listing) for traits, row in rows if _may_be_in(listing, names, traits))
            fields = next((fields for fields in answers if fields is not None), None)
            if fields is not None or not (names() or listing.length("") is not None):
                return fields
    return None


def _may_be_in(storage: Storage, names: Callable[[], Sequence[str]], traits: FormatTraits) -> bool:
    """Return whether a folder may be a checkpoint of a format by its file names, so that the format should be asked.

    Args:
        storage: Storage of the folder, or of a single file.
        names: Function that lists the folder's names; called only if the format's file names have wildcards.
        traits: Traits of the format.
    """
    patterns = [pattern for pattern in traits.decided_by if set(pattern) & set("*?[")]
    plain = [name for name in traits.decided_by if name not in patterns]
    if traits.decided_by in ((), (METADATA_FILE,)) or any("/" in pattern for pattern in traits.decided_by):
        return True  # the format doesn't name its files, or they lie in subfolders
    if any(storage.length(name) is not None for name in plain) or storage.length("") is not None:
        return True
    return bool(patterns) and any(is_deciding(name, patterns) for name in names())


def is_checkpoint(checkpoint_dir: Directory, *, world: Any = None, strategies: Strategies | None = None) -> bool:
    """Return whether a folder, or a single file, holds a finished checkpoint.

    Args:
        checkpoint_dir: Path, URL or storage to look at.
        world: Ranks that all get rank 0's answer, which makes the call collective; None for this process alone.
        strategies: Dispatch table; None for the process's.

    Examples:
        >>> import tempfile
        >>> is_checkpoint(tempfile.mkdtemp())
        False
    """

    def look() -> bool:
        storage = storage_at(checkpoint_dir)
        return _own_metadata(storage) is not None or recognize(storage, strategies) is not None

    return by_rank_zero(world, look)


def by_rank_zero(world: Any, read: Callable[[], Read]) -> Read:
    """Return rank 0's result on every rank of a world; without a world, this process's own result.

    On network storage, ranks may see a change at different times. If all ranks act on a result, only one rank may look.
    """
    return read() if world is None else on_rank_zero(current_world(world), "read of a checkpoint", read)


def _own_metadata(storage: Storage) -> bytes | None:
    """Return the content of metadata.json; None if there is none, or if another program wrote it."""
    try:
        data = metadata_bytes(storage)
    except CorruptCheckpoint:
        return None  # it is too large for a metadata.json of ours
    return None if data is None or is_of_others(data) else data


def load_common(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> Any:
    """Return a checkpoint's common tree, in which holes (placeholders) stand for the shards and objects."""
    strategy = strategy_of(StrategyAction.LOAD_COMMON, choice, common_backend(checkpoint.fields), strategies)
    # Without the check, a read during an overwrite could mix two checkpoints.
    return unreplaced(checkpoint, strategy)


def tensors_of(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> dict[str, ShardedTensor]:
    """Return a checkpoint's stored tensors as shards without data, by key."""
    metadata = sharded_metadata(checkpoint, choice, None, strategies)
    return {key: shard for key, shard in metadata.items() if isinstance(shard, ShardedTensor)}


def sharded_metadata(
    checkpoint: Checkpoint, sharded: Choice, common: Choice, strategies: Strategies | None
) -> Metadata:
    """Return a checkpoint's tensors and objects without data; objects may be stored by the common state's backend."""
    backend = sharded_backend(checkpoint.fields)
    metadata: Metadata = unreplaced(checkpoint, strategy_of(StrategyAction.LOAD_METADATA, sharded, backend, strategies))
    beside = common_backend(checkpoint.fields)
    takes_objects = find_strategy(StrategyAction.LOAD_OBJECTS, *backend, strategies=strategies) is not None
    if takes_objects or (common is None and not are_objects_beside(backend, beside, strategies)):
        return metadata
    fallback = strategy_of(StrategyAction.LOAD_METADATA, common, beside, strategies)
    return {**dict(metadata.items()), **dict(unreplaced(checkpoint, fallback).items())}


def remove_sharded_tensors(
    checkpoint_dir: Directory,
    key_prefix: str,
    *,
    world: Any = None,
    strategies: Strategies | None = None,
) -> None:
    """Remove every stored tensor and object whose key begins with a prefix; collective, executed by rank 0.

    The checkpoint stays loadable at every moment, since a new index replaces the old one first.

    Args:
        checkpoint_dir: Path, URL or storage of the checkpoint.
        key_prefix: Prefix of the keys to remove.
        world: Ranks that take part; torch.distributed's default group, or else this process alone.
        strategies: Dispatch table; None for the process's.

    Raises:
        StrategyError: the checkpoint's format doesn't support removals.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> keys = ("w", "exp_avg.w")
        >>> st.save([st.ShardedTensor.from_rank_offsets(key, torch.zeros(2)) for key in keys], folder)
        >>> st.remove_sharded_tensors(folder, "exp_avg.")
        >>> list(st.load_tensors_metadata(folder))
        ['w']
    """
    ranks = current_world(world)
    remove = partial(_remove, checkpoint_dir, key_prefix, ranks, strategies)
    on_rank_zero(ranks, "remove sharded tensors", remove, given={"key_prefix": key_prefix})


def _remove(directory: Directory, key_prefix: str, world: World, strategies: Strategies | None) -> None:
    if not isinstance(key_prefix, str):
        heading = "remove: invalid key_prefix"
        raise KeyMismatch(error_text(heading, found=type(key_prefix).__name__, expected="a string"))
    checkpoint = open_at(directory, world, LoadOptions(), strategies)
    strategy_of(StrategyAction.REMOVE_SHARDED, None, sharded_backend(checkpoint.fields), strategies)(
        checkpoint, key_prefix
    )


# Collective opening, so that all ranks read the same checkpoint.

OPEN_STEPS = ("load: find the folder", "load: open")


def open_together(
    directory: Directory, world: World, options: LoadOptions, strategies: Strategies | None
) -> Checkpoint:
    """Open a finished checkpoint and return it, the same on all ranks even while a save replaces it; collective.

    Only rank 0 reads metadata.json. Options that must be equal on all ranks are compared.

    Raises:
        NotACheckpoint: the directory holds no finished checkpoint.
        CorruptCheckpoint: metadata.json is damaged.
    """
    alone = partial(open_alone, directory, world, options, strategies)
    local, openings = share(
        world, "load: open", alone, lambda local: (local.fields, local.stamp), steps=OPEN_STEPS, given=alike(options)
    )
    return parse_together(with_opening(local, openings[0], strategies), None, strategies)


def parse_together(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> Checkpoint:
    """Return the checkpoint with its metadata, which rank 0 parses and sends to all ranks; collective.

    For a single rank, or a format without a PARSE row in the dispatch table, the checkpoint is returned unchanged, and
    nothing is sent.

    Args:
        checkpoint: Checkpoint that this rank has opened, with the fields of metadata.json that rank 0 has read.
        choice: The caller's strategy for the shards. If it is a function, nothing is parsed: it may not need metadata.
        strategies: Dispatch table; None for the process's.
    """
    # Only rank 0's fields decide, so that all ranks take the same branch.
    backend = sharded_backend(checkpoint.fields)
    parse = find_strategy(StrategyAction.PARSE, *backend, strategies=strategies)
    if parse is None or checkpoint.world.size == 1:
        return checkpoint

    def parse_once() -> Any:
        if callable(choice):
            return None
        with unless_replaced(checkpoint):
            return checkpoint.once(parse)

    metadata = on_rank_zero(checkpoint.world, "load: parse the metadata", parse_once)
    return checkpoint if metadata is None else replace(checkpoint, cache=checkpoint.cache.adding(parse, metadata))


def open_alone(
    directory: Directory | Checkpoint, world: World, options: LoadOptions, strategies: Strategies | None
) -> Checkpoint:
    """Open a checkpoint on this rank, before ranks communicate, and return it; only rank 0 reads metadata.json.

    `with_opening` later gives rank 0's fields to all other ranks, since a rank may still see an older file on network
    storage. A checkpoint that is open with the same options is not opened again, and keeps its parsed metadata. Errors
    name the step that failed, one of `OPEN_STEPS`.

    Raises:
        NotACheckpoint: the directory holds no finished checkpoint.
        CorruptCheckpoint: metadata.json is damaged.
        StrategyError: `options.verify` has an unknown value.
    """
    if isinstance(directory, Checkpoint) and directory.options == options:
        return replace(directory, world=world)
    with step("load: find the folder"):
        storage = find(directory.storage if isinstance(directory, Checkpoint) else directory, options)
    if world.rank != 0:
        return Checkpoint(storage, {}, world, options)
    with step("load: open"):
        return open_at(storage, world, options, strategies)
