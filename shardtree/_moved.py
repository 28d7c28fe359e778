"""New import paths of modules that have moved, for files, pickles and programs that contain the old paths."""

from __future__ import annotations

MOVED = {
    "_ambient": "core.ambient",
    "_deferred": "core.deferred",
    "buffers.": "optim.buffers.",
    "checkpoint.": "shell.checkpoint.",
    "checkpoint._clues": "inspection._clues",
    "checkpoint._comparison": "inspection._comparison",
    "checkpoint._contents": "inspection._contents",
    "checkpoint._differences": "inspection._differences",
    "checkpoint._fingerprint": "inspection._fingerprint",
    "checkpoint._no_checkpoint": "inspection._no_checkpoint",
    "checkpoint._replicas": "inspection._replicas",
    "checkpoint._verify": "inspection._verify",
    "checkpoint._whole_tensors": "inspection._whole_tensors",
    "checkpoint.conversion": "conversion",
    "checkpoint.loading._exchange": "live._reading",
    "checkpoint.loading._explain": "inspection._explain",
    "checkpoint.loading._explanation": "inspection._explanation",
    "checkpoint.loading._findings": "inspection._findings",
    "checkpoint.loading._undecided": "inspection._undecided",
    "checkpoint.needed_files": "inspection.needed_files",
    "checkpoint.opened": "inspection._opened",
    "checkpoint.series": "series",
    "codec": "core.codec",
    "codec.archives": "formats.archives",
    "codec.pickles": "formats.pickles",
    "core.layouts._coverage": "meshes._coverage",
    "core.layouts.meshes": "meshes",
    "core.moved": "_moved",
    "core.plans._explain": "inspection._explained",
    "core.trees._places": "transforms._tree_places",
    "core.trees._plain": "transforms._plain",
    "display.": "pictures._display.",
    "fingerprints.": "core.fingerprints.",
    "geometry": "core.geometry",
    "layouts.": "core.layouts.",
    "layouts._coverage": "meshes._coverage",
    "layouts._unshard": "live.resharding._unshard",
    "layouts.meshes": "meshes",
    "lazy": "core.lazy",
    "lazy._casts": "conversion._casts",
    "live._read_only": "core.mapping._read_only",
    "mapping.": "core.mapping.",
    "objects.": "core.layouts.",
    "objects._array": "core.layouts._object_array",
    "objects._reshard": "core.layouts._object_reshard",
    "objects._rules": "transforms._object_rules",
    "plans.": "core.plans.",
    "plans._copies": "live.resharding._copies",
    "plans._exchange": "live.resharding._exchange",
    "plans._explain": "inspection._explained",
    "plans._fit": "core.plans._misfits",
    "plans._in_memory": "live.resharding._in_memory",
    "plans.resharding": "live.resharding",
    "quantised._lazy": "core.lazy._sources",
    "retention.": "series.policies.",
    "shell.checkpoint._contents": "inspection._contents",
    "shell.storage._memory": "stores._memory",
    "shell.storage._opened": "maintenance._opened",
    "shell.table.index._damage": "maintenance._verify_index",
    "shell.world._processes": "live._processes",
    "shell.world._simulated": "live._simulated",
    "storage.": "shell.storage.",
    "storage._fsspec": "stores._fsspec",
    "storage._memory": "stores._memory",
    "storage._object_errors": "stores._object_errors",
    "storage._object_store": "stores._object_store",
    "storage._object_streams": "stores._object_streams",
    "storage._object_url": "stores._object_url",
    "storage._url": "stores._url",
    "strategies.": "shell.table.",
    "strategies._manifest": "formats.manifest",
    "strategies.archives": "formats.rank_archives",
    "strategies.base": "strategies.base",
    "strategies.deepspeed": "formats.deepspeed",
    "strategies.dtensor_files": "formats.dtensor_files",
    "strategies.huggingface": "formats.huggingface",
    "strategies.index._damage": "maintenance._verify_index",
    "strategies.manifest": "formats.manifest",
    "strategies.torch": "formats.torch",
    "strategies.torch_checkpointing": "formats.torch_checkpointing",
    "strategies.torch_dist": "formats.torch_dist",
    "strategies.zarr": "formats.zarr",
    "traces._tracer": "traces._cells",
    "trees.": "core.trees.",
    "trees._places": "transforms._tree_places",
    "trees._plain": "transforms._plain",
    "trees._states": "transforms._state_keys",
    "world.": "shell.world.",
    "world._processes": "live._processes",
    "world._simulated": "live._simulated",
}
"""Old import paths and the new ones, both below shardtree. A row moves a module, or a package and all in it. The
longest row that fits counts.

A row that ends with a dot moves only what is in the package: the package itself stays, and re-exports public names.
Rows are never removed.
"""

_PACKAGE = "shardtree."


def new_address(address: str) -> str:
    """Return the import path that a module, or a name in it, has now.

    Args:
        address: Dotted name, from any version since the first; one outside the package is returned unchanged.

    Examples:
        >>> new_address("shardtree.strategies.zarr._save")
        'shardtree.formats.zarr._save'
        >>> new_address("shardtree.errors.TreeError")
        'shardtree.errors.TreeError'
    """
    if not address.startswith(_PACKAGE):
        return address
    below = address.removeprefix(_PACKAGE)
    end = len(below)
    while end > 0:
        # "a.b.c" is looked for as "a.b.c", "a.b.", "a.b", "a." and "a".
        old = below[:end]
        if old in MOVED:
            return _PACKAGE + MOVED[old] + below[end:]
        end = end - 1 if old.endswith(".") else below.rfind(".", 0, end) + 1
    return address
