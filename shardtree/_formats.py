"""Rows of the dispatch table for other programs' formats, and for removal and verification in our own format.

Functions are named by import paths, and imported at their first call: a save in our own format imports no other format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .core.deferred import when_called

Rows = Mapping[Any, Any]
"""Rows of the table; untyped, since the table's types are imported only in `rows`."""

MANIFEST = "integrity.json"
"""Name of Megatron-Core's file with the SHA-256 of every other one."""

_IS_PICKLE = when_called("formats.torch_dist:is_whole")
_IS_SAFETENSORS = when_called("formats.huggingface._listing:is_whole")
_IS_NODE = when_called("formats.zarr:is_whole")
_IS_ARCHIVE = when_called("formats.rank_archives:is_whole_archive")
_IS_DEEPSPEED = when_called("formats.deepspeed._contents:is_whole")

_DEEPSPEED_DECIDED_BY = ("latest", "latest_universal", "*model_states.pt", "*_optim_states.pt")
_RANK_FILES = ("model_world_size_*_rank_*.pt", "optim_world_size_*_rank_*.pt", "extra_state_world_size_*_rank_*.pt")

_READ = ("load_common", "load_sharded", "load_objects", "load_metadata", "verify", "resolve")
"""Actions of a format of torch.save's files that is only read."""


def rows() -> Rows:
    """Return the dispatch-table rows that the shell doesn't define itself, by (action, backend, version).

    A value is the import path of the function that does the action. The value for the action DESCRIBE is itself a
    function: it returns the format's `FormatTraits`.
    """
    # Imported here, since the table calls this function during its own import, when it has imported both names.
    from .shell.table._actions import StrategyAction
    from .shell.table._traits import FormatTraits

    def read_only(backend: str, module: str) -> Rows:
        return {(StrategyAction(name), backend, 1): f"formats.{module}:{name}" for name in _READ}

    return {
        (StrategyAction.REMOVE_SHARDED, "safetensors", 1): "maintenance:remove_sharded",
        (StrategyAction.VERIFY, "safetensors", 1): "maintenance:verify_files",
        (StrategyAction.RECOGNIZE, "huggingface", 1): "formats.huggingface._listing:recognize",
        (StrategyAction.LOAD_COMMON, "huggingface", 1): "formats.huggingface._load:load_common",
        (StrategyAction.LOAD_SHARDED, "huggingface", 1): "formats.huggingface._load:load_sharded",
        (StrategyAction.LOAD_METADATA, "huggingface", 1): "formats.huggingface._load:load_metadata",
        (StrategyAction.PARSE, "huggingface", 1): "formats.huggingface._load:parse",
        (StrategyAction.SAVE_COMMON, "huggingface", 1): "formats.huggingface._save:save_common",
        (StrategyAction.SAVE_SHARDED, "huggingface", 1): "formats.huggingface._save:save_sharded",
        (StrategyAction.PUBLISH, "huggingface", 1): "formats.huggingface._save:publish",
        (StrategyAction.VERIFY, "huggingface", 1): "formats.huggingface._load:verify_files",
        (StrategyAction.LIST_FILES, "huggingface", 1): "formats.huggingface._listing:list_files",
        (StrategyAction.DESCRIBE, "huggingface", 1): lambda: FormatTraits(
            decided_by=("*.safetensors", "*.safetensors.index.json"),
            cuts_chunks="always",
            fills_devices=True,
            is_guess=True,
            shares_files=True,
            writes_common=True,
            is_whole=_IS_SAFETENSORS,
        ),
        (StrategyAction.RECOGNIZE, "dcp_safetensors", 1): "formats.dcp_safetensors:recognize",
        (StrategyAction.LOAD_COMMON, "dcp_safetensors", 1): "formats.dcp_safetensors._contents:load_common",
        (StrategyAction.LOAD_SHARDED, "dcp_safetensors", 1): "formats.dcp_safetensors._contents:load_sharded",
        (StrategyAction.LOAD_METADATA, "dcp_safetensors", 1): "formats.dcp_safetensors._contents:load_metadata",
        (StrategyAction.PARSE, "dcp_safetensors", 1): "formats.dcp_safetensors._contents:parse",
        (StrategyAction.VERIFY, "dcp_safetensors", 1): "formats.dcp_safetensors._contents:verify",
        (StrategyAction.DESCRIBE, "dcp_safetensors", 1): lambda: FormatTraits(
            decided_by=("shard-*-model-*-of-*.safetensors",),
            cuts_chunks="always",
            fills_devices=True,
            is_whole=_IS_SAFETENSORS,
        ),
        (StrategyAction.SAVE_COMMON, "torch", 1): "formats.torch:save_common",
        (StrategyAction.LOAD_COMMON, "torch", 1): "formats.torch:load_common",
        (StrategyAction.VERIFY, "torch", 1): "formats.torch:verify_common",
        (StrategyAction.LIST_FILES, "torch", 1): "formats.torch:list_files",
        (StrategyAction.LOAD_COMMON, "torch_dist", 1): "formats.torch_dist._common:load_common",
        (StrategyAction.LOAD_SHARDED, "torch_dist", 1): "formats.torch_dist._load:load_sharded",
        (StrategyAction.LOAD_OBJECTS, "torch_dist", 1): "formats.torch_dist._load:load_objects",
        (StrategyAction.LOAD_METADATA, "torch_dist", 1): "formats.torch_dist._load:load_metadata",
        (StrategyAction.PARSE, "torch_dist", 1): "formats.torch_dist._listing:parse",
        (StrategyAction.RESOLVE, "torch_dist", 1): "formats.torch_dist._load:resolve",
        (StrategyAction.SAVE_COMMON, "torch_dist", 1): "formats.torch_dist._save:save_common",
        (StrategyAction.SAVE_SHARDED, "torch_dist", 1): "formats.torch_dist._save:save_sharded",
        (StrategyAction.PUBLISH, "torch_dist", 1): "formats.torch_dist._save:publish",
        (StrategyAction.VERIFY, "torch_dist", 1): "formats.torch_dist._verify:verify_files",
        (StrategyAction.LIST_FILES, "torch_dist", 1): "formats.torch_dist._listing:list_files",
        (StrategyAction.RECOGNIZE, "dcp", 1): "formats.torch_dist:recognize",
        (StrategyAction.LOAD_COMMON, "dcp", 1): "formats.torch_dist._common:load_dcp_common",
        (StrategyAction.LOAD_SHARDED, "dcp", 1): "formats.torch_dist._load:load_sharded",
        (StrategyAction.LOAD_OBJECTS, "dcp", 1): "formats.torch_dist._load:load_objects",
        (StrategyAction.LOAD_METADATA, "dcp", 1): "formats.torch_dist._load:load_metadata",
        (StrategyAction.PARSE, "dcp", 1): "formats.torch_dist._listing:parse",
        (StrategyAction.SAVE_COMMON, "dcp", 1): "formats.torch_dist._save:save_dcp_common",
        (StrategyAction.SAVE_SHARDED, "dcp", 1): "formats.torch_dist._save:save_dcp_sharded",
        (StrategyAction.PUBLISH, "dcp", 1): "formats.torch_dist._save:publish_dcp",
        (StrategyAction.VERIFY, "dcp", 1): "formats.torch_dist._verify:verify_files",
        (StrategyAction.LIST_FILES, "dcp", 1): "formats.torch_dist._listing:list_files",
        (StrategyAction.DESCRIBE, "torch_dist", 1): lambda: FormatTraits(
            decided_by=(".metadata",), cuts_chunks="unchecked", manifest=MANIFEST, is_whole=_IS_PICKLE
        ),
        (StrategyAction.DESCRIBE, "dcp", 1): lambda: FormatTraits(
            decided_by=(".metadata",), cuts_chunks="unchecked", is_whole=_IS_PICKLE
        ),
        (StrategyAction.LOAD_SHARDED, "zarr", 1): "formats.zarr._load:load_sharded",
        (StrategyAction.LOAD_OBJECTS, "zarr", 1): "formats.zarr._load:load_legacy_objects",
        (StrategyAction.LOAD_METADATA, "zarr", 1): "formats.zarr._load:load_metadata",
        (StrategyAction.VERIFY, "zarr", 1): "formats.zarr._verify:verify_files",
        (StrategyAction.LIST_FILES, "zarr", 1): "formats.zarr._group:list_files",
        (StrategyAction.RECOGNIZE, "zarr", 3): "formats.zarr:recognize",
        (StrategyAction.LOAD_COMMON, "zarr", 3): "formats.zarr._own:load_own_common",
        (StrategyAction.LOAD_SHARDED, "zarr", 3): "formats.zarr._load:load_sharded",
        (StrategyAction.LOAD_OBJECTS, "zarr", 3): "formats.zarr._load:load_objects",
        (StrategyAction.LOAD_METADATA, "zarr", 3): "formats.zarr._load:load_metadata",
        (StrategyAction.SAVE_COMMON, "zarr", 3): "formats.zarr._own:save_common",
        (StrategyAction.SAVE_SHARDED, "zarr", 3): "formats.zarr._save:save_sharded",
        (StrategyAction.REMOVE_SHARDED, "zarr", 3): "formats.zarr._own:remove_sharded",
        (StrategyAction.PUBLISH, "zarr", 3): "formats.zarr._save:publish",
        (StrategyAction.VERIFY, "zarr", 3): "formats.zarr._verify:verify_files",
        (StrategyAction.LIST_FILES, "zarr", 3): "formats.zarr._group:list_files",
        (StrategyAction.DESCRIBE, "zarr", 1): lambda: FormatTraits(
            decided_by=(".zgroup",), manifest=MANIFEST, is_whole=_IS_NODE
        ),
        (StrategyAction.DESCRIBE, "zarr", 3): lambda: FormatTraits(
            decided_by=("zarr.json", ".zgroup"), manifest=MANIFEST, is_whole=_IS_NODE
        ),
        **read_only("dtensor_files", "dtensor_files._contents"),
        (StrategyAction.RECOGNIZE, "dtensor_files", 1): "formats.dtensor_files:recognize",
        (StrategyAction.DESCRIBE, "dtensor_files", 1): lambda: FormatTraits(
            decided_by=_RANK_FILES, is_whole=_IS_ARCHIVE
        ),
        **read_only("deepspeed", "deepspeed._contents"),
        (StrategyAction.RECOGNIZE, "deepspeed", 1): "formats.deepspeed:recognize",
        (StrategyAction.DESCRIBE, "deepspeed", 1): lambda: FormatTraits(
            decided_by=_DEEPSPEED_DECIDED_BY, is_whole=_IS_DEEPSPEED
        ),
        **read_only("universal", "deepspeed._universal"),
        (StrategyAction.RECOGNIZE, "universal", 1): "formats.deepspeed:recognize_universal",
        (StrategyAction.DESCRIBE, "universal", 1): lambda: FormatTraits(
            decided_by=_DEEPSPEED_DECIDED_BY, is_whole=_IS_DEEPSPEED
        ),
        **read_only("torch_checkpointing", "torch_checkpointing._contents"),
        (StrategyAction.RECOGNIZE, "torch_checkpointing", 1): "formats.torch_checkpointing:recognize",
        (StrategyAction.DESCRIBE, "torch_checkpointing", 1): lambda: FormatTraits(
            decided_by=("metadata.pkl", "*_0.pt"), is_whole=_IS_ARCHIVE
        ),
    }
