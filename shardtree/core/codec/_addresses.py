"""Stored names of shardtree's own classes: public import paths, which don't name the module that defines the class.

The defining module may move, while the public import path stays valid. It is `shardtree.Name` for classes that the
root package exports, such as `shardtree.Mesh`, and otherwise a path in a public package, such as `shardtree.plans.Gap`.
"""

from __future__ import annotations

from ..deferred import leaf

_HOMES = {
    "shardtree": {
        "checkpoint.loading._strict": "StrictHandling",
        "checkpoint.series._series": "CheckpointSeries",
        "layouts.meshes._mesh": "Mesh",
        "layouts.meshes._specs": "PartitionSpec",
        "lazy._tensor": "LazyTensor",
        "mapping._leaves": "LocalNonpersistentObject ShardedObject ShardedTensorFactory",
        "mapping._tensor": "ShardedTensor",
        "plans.resharding._plan": "ReshardPlan",
        "strategies._actions": "StrategyAction",
        "strategies._values": "AsyncRequest LoadOptions SaveOptions",
        "traces._trace": "Trace",
    },
    "shardtree.buffers": {"buffers._plan": "BufferPlace BufferPlan BufferRange"},
    "shardtree.checkpoint": {
        "checkpoint._comparison": "CheckpointDifference KindDifference",
        "checkpoint._differences": "ValueDifference",
        "checkpoint._replicas": "ReplicaDifference",
        "checkpoint.conversion._convert": "ConversionReport",
        "checkpoint.conversion._report": "ConversionReport",
        "checkpoint.opened": "OpenCheckpoint",
        "checkpoint.series._listing": "FileMark",
        "checkpoint.series._removal": "Removal StepFiles",
    },
    "shardtree.display": {"display": "Drawing"},
    "shardtree.fingerprints": {"fingerprints._tensors": "PartialFingerprint"},
    "shardtree.interop.dtensor": {"interop.dtensor._module": "ModuleKeys"},
    "shardtree.kit": {
        "core.codec._header": "HeaderEntry",
        "core.plans._load": "LoadPlan Runs StoredChunks",
        "shell.table._actions": "Copies Resolution",
        "shell.table.index._metadata": "DeferredMetadata IndexMetadata",
    },
    "shardtree.layouts": {
        "layouts._columns": "ShardColumns TensorKind",
        "layouts._coverage": "Coverage",
        "layouts._objects": "ObjectColumns",
        "layouts._problems": "Problem",
        "layouts._stored": "StoredLayout",
        "layouts.meshes._shards": "RankShard",
        "layouts.meshes._specs": "AxisSplit",
    },
    "shardtree.lenses": {"lenses._axis_runs": "AxisRuns", "lenses._lens": "StoredForm"},
    "shardtree.objects": {"objects._array": "ObjectArray", "objects._reshard": "ShapeChange"},
    "shardtree.optim": {"optim._leaf": "OptimizerState"},
    "shardtree.pictures": {
        "pictures._picture": "Bar Bars Block Cell Entry Flow Line Moment Picture Plane Stream",
    },
    "shardtree.plans": {
        "core.plans._cost": "ReadCost",
        "core.plans._misfits": "Gap Mismatch Refusal Unexpected",
        "plans._explain": "Explanation FailedCheck RankReads ReadCost Undecided",
        "plans._fit": "Gap Mismatch Refusal Unexpected",
        "plans._without_scales": "ScaledValues",
        "plans.resharding._schedule": "Schedule",
        "plans.resharding._summary": "Origin Provenance",
        "plans.resharding._transfers": "Transfers",
    },
    "shardtree.quantised": {"quantised._form": "Form", "quantised._part": "Part"},
    "shardtree.retention": {"retention": "RetentionPolicy SavedStep"},
    "shardtree.storage": {
        "storage._capabilities": "Capabilities Entry",
        "storage._checked": "ByteRanges ReadReport StoredFile",
        "storage._local": "LocalStorage",
        "storage._memory": "BytesReader MemoryStorage",
        "storage._refusals": "Refusal Refusals SaveReport",
        "storage._storage": "SizedBuffers",
    },
    "shardtree.strategies": {
        "strategies._findings": "Checked Damage Region Unchecked VerifyReport",
        "strategies._traits": "FormatTraits",
        "strategies._values": "Checkpoint Outcome PendingSave Replaced",
        "strategies.index._columns": "Index",
        "strategies.index._save": "RankFiles StoredItem",
    },
    "shardtree.strategies.torch_dist._write": {"strategies.torch_dist._write": "RankFile"},
    "shardtree.strategies.zarr._save": {"strategies.zarr._save": "RankFiles"},
    "shardtree.testing": {
        "testing._law_resume": "ResumeProblem",
        "testing._layouts": "Piece",
        "testing._optimizer_states": "OptimizerState",
        "testing._states": "GlobalState",
    },
    "shardtree.traces": {
        "lazy._sources": "Box",
        "traces._differences": "Difference",
        "traces._moves": "Move",
        "traces._problems": "Problem",
        "traces._steps": "Kind",
    },
    "shardtree.trees": {
        "core.trees._difference": "NumericDifference WorstElement",
        "trees._difference": "Difference",
        "trees._join": "Record",
    },
}
"""Classes by public module, then by a module below shardtree that defines them, or did when files were written.

Files name the old modules, so no row may ever be removed. A class that moves alone gets another row; for whole modules
that move, `_moved` has the new import paths. Private classes appear in journals of conversions.
"""

STORED_NAMES = {
    address: f"{public}.{name}"
    for public, homes in _HOMES.items()
    for home, names in homes.items()
    for name in names.split()
    for address in (f"shardtree.{home}.{name}", leaf("new_address")(f"shardtree.{home}.{name}"))
}
"""Stored name of each class, by its import path in a module that defines or once defined it."""


def stored_name(address: str) -> str:
    """Return the stored name of a class: the public import path of shardtree's classes, the given path of others.

    Args:
        address: Import path of the class (module and qualified name), now or when a file was written.

    Examples:
        >>> stored_name("shardtree.layouts.meshes._mesh.Mesh"), stored_name("shardtree.Mesh")
        ('shardtree.Mesh', 'shardtree.Mesh')
        >>> stored_name("http.HTTPStatus")
        'http.HTTPStatus'
    """
    return STORED_NAMES.get(address, address)


def addresses_of(name: str) -> tuple[str, ...]:
    """Return all import paths of a stored class: its stored name, and its paths in modules that define it or once did.

    Examples:
        >>> addresses_of("shardtree.Mesh")
        ('shardtree.Mesh', 'shardtree.layouts.meshes._mesh.Mesh', 'shardtree.meshes._mesh.Mesh')
        >>> addresses_of("http.HTTPStatus")
        ('http.HTTPStatus',)
    """
    return (name, *(address for address, stored in STORED_NAMES.items() if stored == name))
