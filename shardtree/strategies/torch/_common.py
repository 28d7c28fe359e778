"""The common state as Megatron-Core stores it: in ``common.pt``, which torch.save writes, without its shards."""

from __future__ import annotations

from typing import Any

from ...errors import CheckpointReplaced, CorruptCheckpoint, UnsafeFile, UnsupportedValue, error_text
from ...storage import Buffer
from .._archive_check import archive_unchecked
from .._findings import Damage, Finding
from .._manifest import check_listed
from .._missing import was_replaced
from .._values import Checkpoint, Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ._holes import decode_with_holes, encode_with_holes

BACKEND, VERSION = "torch", 1

COMMON_FILE = "common.pt"


@register_default_strategy(StrategyAction.SAVE_COMMON, BACKEND, VERSION)
def save_common(draft: Draft, common: Any) -> Fields:
    """Write the common tree, and return the format that it is in.

    Where a dict had a shard the key is left out, as Megatron-Core does. It leaves shards out of lists too, and then
    what follows has another position; here an empty dict stands in the shard's place, which Megatron-Core's `load`
    joins with a dict of shards, and refuses to join with anything else. A record beside torch's own says which of them
    were shards.

    Raises:
        UnsupportedValue: a value would have to be pickled, and `allow_pickle` isn't given.
    """
    data = encode_with_holes(common, allow_pickle=draft.options.allow_pickle)
    draft.storage.write(COMMON_FILE, [memoryview(data)], durable=draft.options.durable)
    return {"common_backend": BACKEND, "common_backend_version": VERSION}


@register_default_strategy(StrategyAction.LOAD_COMMON, BACKEND, VERSION)
def load_common(checkpoint: Checkpoint) -> Any:
    """Return the stored common tree, with holes where lists and tuples had shards.

    Raises:
        CorruptCheckpoint: there is no such file, or it isn't what was saved.
        UnsafeFile: reading it takes pickled code, and `allow_pickle` isn't given.
    """
    data, what = _read(checkpoint)
    return decode_with_holes(data, what, checkpoint.options)


@register_default_strategy(StrategyAction.VERIFY, BACKEND, VERSION)
def verify_common(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return whether common.pt is damaged: a checksum differs, or it can't be read at all."""
    try:
        load_common(checkpoint)
    except CorruptCheckpoint as error:
        return (Damage(COMMON_FILE, str(error)),)
    except (UnsafeFile, UnsupportedValue):
        pass  # sound, as far as its checksums go; what it holds isn't the question
    data, _ = _read(checkpoint)
    checkpoint.options.progress(data.nbytes)
    return archive_unchecked(COMMON_FILE, data)


@register_default_strategy(StrategyAction.LIST_FILES, BACKEND, VERSION)
def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the name of the one file."""
    return (COMMON_FILE,)


def _read(checkpoint: Checkpoint) -> tuple[Buffer, str]:
    where = checkpoint.storage.where(COMMON_FILE)
    if checkpoint.storage.length(COMMON_FILE) is None:
        if was_replaced(checkpoint):
            raise CheckpointReplaced(error_text(f"open: {where!r} was replaced by a later save", fix="Open it again."))
        fix = "The save wasn't finished, or the file was removed; load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: {where!r} isn't there, the common state", fix=fix))
    if checkpoint.options.verify is not None:
        check_listed(checkpoint, COMMON_FILE)
    with checkpoint.storage.open(COMMON_FILE) as reader:
        return reader.mapped(), where
