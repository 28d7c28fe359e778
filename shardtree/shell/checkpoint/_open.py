"""Opening a checkpoint: which formats it is in, what is in it, and reading parts of it when asked."""

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
"""What rank 0 tells the others of a checkpoint that it has opened."""

Read = TypeVar("Read")

CONTENT_METADATA = "content_metadata"


def open_at(directory: Directory, world: World, options: LoadOptions, strategies: Strategies | None) -> Checkpoint:
    """Return a finished checkpoint, its formats read; not collective.

    Raises:
        NotACheckpoint: there is none.
        CorruptCheckpoint: metadata.json isn't what was written.
        StrategyError: there is no such way to verify.
    """
    storage = find(directory, options)
    # The stamp comes before the fields: a checkpoint that replaces this one in between is then noticed on a read.
    decided_by = deciding_files(strategies)
    own_stamp = stamp(storage, decided_by)
    fields = read_fields(storage, strategies)
    traits = traits_together(fields, decided_by, strategies)
    return Checkpoint(storage, fields, world, options, stamp=own_stamp, traits=traits)


def with_opening(checkpoint: Checkpoint, opening: Opening, strategies: Strategies | None) -> Checkpoint:
    """Return a checkpoint as rank 0 has opened it."""
    if checkpoint.world.rank == 0:
        return checkpoint
    fields, shared_stamp = opening
    traits = traits_together(fields, deciding_files(strategies), strategies)
    return replace(checkpoint, fields=fields, stamp=shared_stamp, traits=traits)


def traits_together(fields: Fields, decided_by: tuple[str, ...], strategies: Strategies | None) -> FormatTraits:
    """Return what holds of a checkpoint's two formats, that of its shards and that of its common state.

    Args:
        fields: of metadata.json.
        decided_by: the `deciding_files` of all formats.
        strategies: the dispatch table; None for the process's.
    """
    sharded = traits_of(*sharded_backend(fields), strategies)
    common = traits_of(*common_backend(fields), strategies)
    in_save_folder = sharded.in_save_folder and common.in_save_folder
    check = partial(is_whole, strategies)
    return replace(sharded, decided_by=decided_by, in_save_folder=in_save_folder, is_whole=check)


def find(directory: Directory, options: LoadOptions) -> Storage:
    """Return a checkpoint's storage, after checking the options."""
    check_options("open", options, LoadOptions)
    if options.verify not in ("whole", "all", None):
        expected = "'whole', 'all' or None"
        raise StrategyError(error_text("open: no such verify", found=repr(options.verify)[:200], expected=expected))
    return storage_at(directory)


def read_fields(storage: Storage, strategies: Strategies | None) -> Fields:
    """Return the fields of metadata.json, or those that a recognised format without one would have there.

    A metadata.json without any field of ours is another program's: it counts as none where a format is recognised.

    Raises:
        NotACheckpoint: there is neither.
        CorruptCheckpoint: metadata.json isn't what was written.
    """
    fields = _fields_at(storage, strategies)
    if fields is not None:
        return fields
    if (data := metadata_bytes(storage)) is not None:
        return decode_metadata(data, storage.where(METADATA_FILE))  # raises: it is another program's
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
    """Return the fields from the first format that recognises a place without metadata.json, None if none does.

    Formats with an index of their own come first: a single safetensors file beside one is an export, say.
    """
    # A plain DCP folder or a Hugging Face model has no metadata.json and may not get one: formats recognise their own.
    table = table_of(strategies)
    rows = [(traits_of(*row[1:], strategies), row) for row in table if row[0] is StrategyAction.RECOGNIZE]
    with listed(storage, deep=False) as listing:
        names = cache(listing.names)  # listed once, and only if no plain name decides
        ordered = sorted(rows, key=lambda each: each[0].is_guess)
        # Only formats whose files may be there: asking one imports it.
        asked = (row for traits, row in ordered if _may_be_in(listing, names, traits))
        answers = (table[row](listing) for row in asked)
        return next((fields for fields in answers if fields is not None), None)


def _may_be_in(storage: Storage, names: Callable[[], Sequence[str]], traits: FormatTraits) -> bool:
    """Return whether a folder has a file that decides for a format, as far as the format says which these are."""
    patterns = [pattern for pattern in traits.decided_by if set(pattern) & set("*?[")]
    plain = [name for name in traits.decided_by if name not in patterns]
    if traits.decided_by in ((), (METADATA_FILE,)) or any("/" in pattern for pattern in traits.decided_by):
        return True  # it doesn't say which, or they lie further down
    if any(storage.length(name) is not None for name in plain) or storage.length("") is not None:
        return True
    return bool(patterns) and any(is_deciding(name, patterns) for name in names())


def is_checkpoint(checkpoint_dir: Directory, *, world: Any = None, strategies: Strategies | None = None) -> bool:
    """Return whether a folder, or a single file, holds a finished checkpoint.

    Args:
        checkpoint_dir: where it may be.
        world: the ranks that get one answer, which rank 0 finds: then it is collective. None: this process alone.
        strategies: the dispatch table; None for the process's.

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

    On network storage, ranks may see the latest change at different times: where all act on it, one has to look.
    """
    return read() if world is None else on_rank_zero(current_world(world), "read of a checkpoint", read)


def _own_metadata(storage: Storage) -> bytes | None:
    """Return the bytes of a metadata.json of ours, None if there is none."""
    try:
        data = metadata_bytes(storage)
    except CorruptCheckpoint:
        return None  # too large for one of ours
    return None if data is None or is_of_others(data) else data


def load_common(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> Any:
    """Return a checkpoint's common tree, with holes where shards were."""
    strategy = strategy_of(StrategyAction.LOAD_COMMON, choice, common_backend(checkpoint.fields), strategies)
    # Without this, a read that spans an overwrite could mix two checkpoints.
    return unreplaced(checkpoint, strategy)


def tensors_of(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> dict[str, ShardedTensor]:
    """Return a checkpoint's tensors, by key."""
    metadata = sharded_metadata(checkpoint, choice, None, strategies)
    return {key: shard for key, shard in metadata.items() if isinstance(shard, ShardedTensor)}


def sharded_metadata(
    checkpoint: Checkpoint, sharded: Choice, common: Choice, strategies: Strategies | None
) -> Metadata:
    """Return a checkpoint's tensors and objects; the common backend's too, where the sharded one holds no objects."""
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
    """Remove every stored tensor and object whose key begins with a prefix; collective, done by rank 0.

    The checkpoint stays loadable at every moment: a new index takes the old one's place first.

    Raises:
        StrategyError: the checkpoint's format can't do that.

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
        what = "remove: not the beginning of a key"
        raise KeyMismatch(error_text(what, found=type(key_prefix).__name__, expected="a string"))
    checkpoint = open_at(directory, world, LoadOptions(), strategies)
    strategy_of(StrategyAction.REMOVE_SHARDED, None, sharded_backend(checkpoint.fields), strategies)(
        checkpoint, key_prefix
    )


# Opening on several ranks, so that all of them read the same checkpoint

OPEN_STEPS = ("load: find the folder", "load: open")


def open_together(
    directory: Directory, world: World, options: LoadOptions, strategies: Strategies | None
) -> Checkpoint:
    """Return a finished checkpoint, the same on all ranks even while a save replaces it: rank 0 reads metadata.json.

    Options that ranks need alike are compared.

    Raises:
        NotACheckpoint: there is none.
        CorruptCheckpoint: metadata.json isn't what was written.
    """
    alone = partial(open_alone, directory, world, options, strategies)
    own, openings = share(
        world, "load: open", alone, lambda own: (own.fields, own.stamp), steps=OPEN_STEPS, given=alike(options)
    )
    return parse_together(with_opening(own, openings[0], strategies), None, strategies)


def parse_together(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> Checkpoint:
    """Return the checkpoint with its metadata parsed by rank 0 for all; collective, and only for formats with that row.

    Args:
        checkpoint: as this rank opened it, its fields rank 0's.
        choice: the caller's for the shards: with a function of its own, nothing may need the metadata.
        strategies: the dispatch table; None for the process's.
    """
    # By rank 0's fields alone, so that all ranks take the same way here.
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
    """Return a checkpoint as this rank sees it before ranks exchange anything; its steps are `OPEN_STEPS`.

    Only rank 0 reads the fields, for all ranks: on network storage, others may see the latest change later. A
    checkpoint that is open with the same options isn't opened again: what formats have parsed of it is kept.

    Raises:
        NotACheckpoint: there is none.
        CorruptCheckpoint: metadata.json isn't what was written.
        StrategyError: there is no such way to verify.
    """
    if isinstance(directory, Checkpoint) and directory.options == options:
        return replace(directory, world=world)
    with step("load: find the folder"):
        storage = find(directory.storage if isinstance(directory, Checkpoint) else directory, options)
    if world.rank != 0:
        return Checkpoint(storage, {}, world, options)
    with step("load: open"):
        return open_at(storage, world, options, strategies)
