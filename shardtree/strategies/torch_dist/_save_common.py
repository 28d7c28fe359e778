"""Saving the common state: Megatron-Core's common.pt, or a file of plain values for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointingException, TreePath, render_path
from ...storage import Buffer
from .._values import Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ..torch import COMMON_FILE, encode_with_holes
from ..torch import save_common as save_torch_common
from ._backends import DCP, TORCH_DIST
from ._save_values import check_names, named_values, without_hollow
from ._write import data_file, note
from ._write_collect import Archive, stored_by

VALUES = "dcp values"
"""What the draft's memo has the plain values under."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A plain value of the common state.

    Attributes:
        name: its path, joined by dots.
        path: where it stands in the common tree.
        archive: where it is stored.
    """

    name: str
    path: TreePath
    archive: Archive


@register_default_strategy(StrategyAction.SAVE_COMMON, *TORCH_DIST)
def save_common(draft: Draft, common: Any) -> Fields:
    """Write common.pt, and return that the common state is in its format."""
    note(draft, COMMON_FILE)
    return {**save_torch_common(draft, common), "common_backend": "torch", "common_backend_version": 1}


@register_default_strategy(StrategyAction.SAVE_COMMON, *DCP)
def save_dcp_common(draft: Draft, common: Any) -> Fields:
    """Write the common tree's plain values, each an archive of its own; the index will say where.

    Raises:
        UnsupportedValue: a value can't be stored.
        TreeError: two of them, or a value and a shard, have one name.
    """
    stored = stored_by(draft, DCP[0])
    taken = {*stored.columns.keys, *stored.objects}
    named = without_hollow(named_values(common), taken)
    check_names(named, taken)
    encoded = {name: _encoded(path, value, draft) for name, (path, value) in named.items()}
    file, byte, values = data_file(0, 1), 0, []
    for name, data in encoded.items():
        values.append(StoredValue(name, named[name][0], (file, byte, len(data))))
        byte += len(data)
    if values:
        draft.storage.write(note(draft, file), _buffers(encoded), durable=draft.options.durable)
    draft.memo[VALUES] = tuple(values)
    return {"common_backend": DCP[0], "common_backend_version": DCP[1]}


def _encoded(path: TreePath, value: Any, draft: Draft) -> bytes:
    try:
        return encode_with_holes(value, allow_pickle=draft.options.allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the value at {render_path(path, 'common')}")
        raise


def _buffers(encoded: dict[str, bytes]) -> Iterator[Buffer]:
    return map(memoryview, encoded.values())
