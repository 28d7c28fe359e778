"""The common state in a zarr folder: the common codec's bytes, as an array of them."""

from __future__ import annotations

from typing import Any

from ...codec import decode_tree, encode_tree
from ...storage import digest
from .._checked import read_checked
from .._values import Checkpoint, Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ._blobs import blob, write_blob

BACKEND, VERSION = "zarr", 3


@register_default_strategy(StrategyAction.SAVE_COMMON, BACKEND, VERSION)
def save_common(draft: Draft, common: Any) -> Fields:
    """Write the common tree as one array of bytes, and return what metadata.json says about it."""
    data = encode_tree(common, allow_pickle=draft.options.allow_pickle)
    name, document = blob("common", len(data))
    write_blob(draft.storage, name, [memoryview(data)], document, durable=draft.options.durable)
    return {"common": {"name": name, "length": len(data), "digest": digest(data)}}


@register_default_strategy(StrategyAction.LOAD_COMMON, BACKEND, VERSION)
def load_common(checkpoint: Checkpoint) -> Any:
    """Return the stored common tree, with holes where shards were; an empty one if another program wrote the arrays."""
    if "common" not in checkpoint.fields:
        return {}
    data, _ = read_checked(checkpoint, "common")
    options = checkpoint.options
    return decode_tree(data, types=options.types, allow_pickle=options.allow_pickle)
