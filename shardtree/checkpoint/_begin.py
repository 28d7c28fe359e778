"""The beginning of a save: it gets a name, and a folder that every rank sees."""

from __future__ import annotations

import secrets
import time
from functools import partial

from ..errors import AlreadyACheckpoint, StorageError, StrategyError, error_text
from ..storage import Directory, Storage, storage_at
from ..strategies import METADATA_FILE, Draft, SaveOptions, Strategies, is_of_others
from ..world import World, agree, on_rank_zero
from ._dispatch import DEFAULT_BACKEND, Backends
from ._open import recognized


def begin(
    world: World,
    directory: Directory,
    options: SaveOptions,
    backends: Backends,
    strategies: Strategies,
    *,
    overwrite: bool,
) -> Draft:
    """Return the draft of a checkpoint, its folder made; collective.

    Args:
        world: who saves together.
        directory: where to.
        options: how.
        backends: of the shards and of the common state.
        strategies: the dispatch table.
        overwrite: whether a checkpoint that is already there may be replaced.

    Raises:
        AlreadyACheckpoint: there is a checkpoint already, and `overwrite` isn't given.
        StrategyError: it is given, and the format can't replace a checkpoint in place.
        StorageError: the folder can't be made, some rank doesn't see it, or another program's metadata.json is in it.
    """
    storage = agree(world, "save: find the folder", partial(storage_at, directory))
    begun = partial(_make_save_folder, storage, backends, strategies, overwrite=overwrite, durable=options.durable)
    save_id, before = on_rank_zero(world, "save: make the folder", begun)
    agree(world, "save: see the folder", partial(_see_folder, storage, save_id, world.rank))
    return Draft(storage, save_id, world, before, options)


def _make_save_folder(
    storage: Storage, backends: Backends, strategies: Strategies, *, overwrite: bool, durable: bool
) -> tuple[str, bytes | None]:
    before = storage.read(METADATA_FILE) if storage.length(METADATA_FILE) is not None else None
    if before is not None and is_of_others(before):
        what = f"save: {storage.where(METADATA_FILE)!r} belongs to another program"
        raise StorageError(error_text(what, fix="Save to another folder: a checkpoint has a file of that name."))
    if before is not None or recognized(storage, strategies) is not None:
        _check_replaceable(storage, backends, overwrite=overwrite)
    save_id = f"save-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(8)}"
    storage.make_folder(save_id, durable=durable)
    return save_id, before


def _check_replaceable(storage: Storage, backends: Backends, *, overwrite: bool) -> None:
    if not overwrite:
        fix = "Save to another folder, or pass overwrite=True to replace the checkpoint once the new one is complete."
        raise AlreadyACheckpoint(error_text(f"save: {storage.where()!r} already holds a checkpoint", fix=fix))
    others = sorted({name for name, _ in backends} - {DEFAULT_BACKEND[0]})
    if others:
        # Their files have fixed names, so that writing would destroy the old checkpoint before the new one is whole.
        what = f"save: {storage.where()!r} already holds a checkpoint, and {others[0]!r} can't replace one in place"
        raise StrategyError(error_text(what, fix="Save to a new folder, then remove the old one."))


def _see_folder(storage: Storage, save_id: str, rank: int) -> None:
    if not storage.is_folder(save_id):
        fix = "Save to a folder on storage that all ranks share."
        raise StorageError(
            error_text(
                f"save: {storage.where()!r} is not shared: rank {rank} doesn't see what rank 0 made in it", fix=fix
            )
        )
