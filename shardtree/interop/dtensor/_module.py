"""`load_module`, which fills a module's parameters and buffers, whole or sharded, from a checkpoint by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from ...core.ambient import shielded
from ...errors import KeyMismatch, ShapeError, UnsupportedValue, error_text
from ...shell.storage import Directory
from ...shell.table import LoadOptions, Strategies
from ...shell.world import agree, current_world, on_rank_zero
from ._module_fill import (
    ModuleSource,
    common_values,
    deliver,
    fill_alone,
    loader_of,
    read_value,
    stored_shapes,
    target_of,
)
from ._module_hooks import has_renaming_hooks, overrides_loading
from ._module_names import Named, UnreadValue, all_tensors, by_stored_key, has_elements, stored_by_name, unfilled
from ._module_walk import EXTRA_STATE, IncompatibleKeys, Walk, fills_of, foreseen, load_by_override, settle, walk
from ._placed import Strided

Shapes: TypeAlias = Mapping[str, tuple[int, ...] | None]
"""Stored tensors' shapes by key; None for objects."""


@dataclass(frozen=True, slots=True)
class ModuleKeys:
    """Keys that the module or the checkpoint lacks.

    Attributes:
        missing: Sorted keys of the module's tensors that aren't stored, and so keep their values; also names that a
            hook reports as missing.
        unused: Sorted keys of stored tensors that the module has no name for, or that its `load_state_dict` doesn't
            take.
        kept: Sorted keys of values that aren't stored, but don't count as missing, and so keep their values: extra
            states without tensors, and a batch norm's `num_batches_tracked`, which old checkpoints lack.
    """

    missing: tuple[str, ...]
    unused: tuple[str, ...]
    kept: tuple[str, ...] = ()


@shielded
def load_module(
    module: torch.nn.Module,
    checkpoint_dir: Directory,
    *,
    key: Callable[[str], str] = str,
    strict: bool = True,
    cast: bool = False,
    plain: Sequence[str] = (),
    world: Any = None,
    within: Any = None,
    strided: Strided = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> ModuleKeys:
    """Fill a module's parameters and buffers in place; every rank calls it with its own part of the module.

    The module may be cut by FSDP2, tensor parallelism or `distribute_tensor`, and the checkpoint may be in any format
    and layout, such as a Hugging Face model's folder. Each rank reads the bytes of its own part. Several names of one
    tensor (tied weights) need one stored tensor; if several are stored, they must be equal. Values that aren't stored
    as tensors are looked for in the common state, where plain buffers and extra states may be. Buffers that
    `state_dict` leaves out (``persistent=False``) keep their values. If the load fails, the module's values are lost.

    Hooks run as in ``module.load_state_dict(...)`` with the stored values. A module with load pre-hooks or its own
    `_load_from_state_dict` loads itself, from a state dict that reads each tensor when it is accessed: as a DTensor
    with the placements of the module's tensor, or as a whole tensor on the CPU. Tensors of its children are read in
    this way only if the hook accesses them. Post-hooks and setters of extra states run in torch's order, once the
    tensors that come before them are filled. Torch's own hooks that look at no element, such as FSDP2's, cause no such
    reads. If `module` overrides `load_state_dict`, the override is called, and may read everything that is stored.

    Args:
        module: Module with memory on any device: after ``module.to_empty(device=...)`` if it was built on the meta
            device, and with tied weights tied again, since `to_empty` unties them.
        checkpoint_dir: Path or URL that all ranks see, or a `Storage`.
        key: Function from a name in the module's `state_dict` to the stored key; by default they are the same. Tensors
            with the same stored key are all filled from it, if they have the same size and are cut alike.
        strict: Whether it is an error if a tensor isn't stored, if the module's own `load_state_dict` doesn't take it,
            or if a hook reports it as missing. If False, the module keeps its values, and their keys are returned.
        cast: Whether values of another stored dtype are converted, as by `load`; otherwise they are an error. Hooks get
            a parameter's values in the stored dtype.
        plain: Patterns of stored keys whose values need no scales, as for `load`.
        world: World of the ranks that take part; by default torch.distributed's default group, or this process alone.
        within: DeviceMesh whose ranks all hold this module, as for `from_dtensors`. Plain tensors are taken to be whole
            on each rank.
        strided: Meaning of a `_StridedShard`, as for `from_dtensors`.
        strategies: Dispatch table; None for the process's.
        options: Options of the load.

    Returns:
        The keys that only the module or only the checkpoint has.

    Raises:
        KeyMismatch: A tensor isn't stored under any of its names, or the module doesn't take it, and `strict` is True;
            or `key` returns one stored key for tensors that differ in size, dtype or placements.
        UnsupportedValue: The module is on the meta device, or has parameters that aren't initialised yet.
        MetadataError: The module has plain tensors, and this rank isn't in the mesh `within`.
        IntegrityError: A tensor's several names are stored with different values.
        ShapeError: Stored values don't fit the module, or its own `load_state_dict` refuses them; or quantised values
            would be cast without their scales.
        CheckpointingException: An error of `load`, or of a hook, which is named.

    Examples:
        >>> import tempfile, shardtree as st
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
        >>> tree = {"weight": torch.ones(1, 2), "bias": torch.zeros(1), "more": torch.zeros(3)}
        >>> st.save({key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in tree.items()}, folder)
        >>> load_module(model, folder)
        ModuleKeys(missing=(), unused=('more',), kept=())
        >>> model.weight.data
        tensor([[1., 1.]])
    """
    ranks, source = (
        current_world(world),
        ModuleSource(checkpoint_dir, cast, plain, within, strided, strategies, options),
    )
    shapes = on_rank_zero(ranks, "load_module: list what is stored", lambda: stored_shapes(source))

    def find_names() -> tuple[_Loading, Named, dict[str, Any]]:
        loading = _begin(module, source, key, shapes)
        _load_hooked(loading)
        keys = foreseen(loading.walk)
        if keys is not None:
            _report(loading, keys, shapes, strict=strict)
        names = by_stored_key(fills_of(loading.walk.pending))
        return loading, names, target_of(source, names, loading.common, ranks)

    loading, names, target = agree(ranks, "load_module: find names", find_names, given={"strict": strict})
    values = loader_of(source)(target, world=ranks)
    fill = partial(deliver, names, loading.common | values, cast=cast)
    agree(ranks, "load_module: compare tied tensors", fill)

    def finish() -> ModuleKeys:
        settle(loading.walk, lambda _: None)
        final_keys = IncompatibleKeys(loading.walk.missing, loading.walk.unexpected)
        return _report(loading, final_keys, shapes, strict=strict)

    return agree(ranks, "load_module: load the rest", finish)


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """A load of a module in progress: its names matched with stored values.

    Attributes:
        module: The module.
        keys: Stored key of each name in `state_dict`, and of each further name that `load_state_dict` looks for.
        extras: Entries of the module's `state_dict` that are neither parameters nor buffers, by name.
        hidden: Names of parameters and buffers that a hook leaves out of `state_dict`.
        entries: Stored values, not read yet, by name.
        common: Values of the common state, by stored key.
        walk: State of the walk over the module and its children, which records the entries that they load.
    """

    module: torch.nn.Module
    keys: Mapping[str, str]
    extras: Mapping[str, Any]
    hidden: frozenset[str]
    entries: Mapping[str, UnreadValue]
    common: Mapping[str, Any]
    walk: Walk


def _begin(module: torch.nn.Module, source: ModuleSource, key: Callable[[str], str], shapes: Shapes) -> _Loading:
    """Match a module's names with stored keys, and return the load; no tensor is read yet.

    Args:
        module: Module to load.
        source: Checkpoint, and how to read it.
        key: Function from a name in `state_dict` to the stored key.
        shapes: Shapes of stored tensors, and None for objects, by stored key.

    Raises:
        UnsupportedValue: A tensor of the module has no memory (meta device).
    """
    state = module.state_dict(keep_vars=True)
    named_tensors = dict(all_tensors(module))
    tensors = {name: tensor for name, tensor in named_tensors.items() if not is_lazy(tensor)}
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        fix = "Call module.to_empty(device=...) first, and set the buffers that state_dict leaves out."
        raise UnsupportedValue(error_text("load_module: tensors without memory (meta)", offenders=meta, fix=fix))
    tensor_ids = {*map(id, named_tensors.values())}
    extras = {name: value for name, value in state.items() if id(value) not in tensor_ids}
    # A hook may give tensors other names in `state_dict`, or leave them out.
    shown = {id(value): name for name, value in state.items()}
    other_names = {name: shown.get(id(tensor)) for name, tensor in tensors.items() if name not in state}
    hidden = frozenset(name for name, other in other_names.items() if other is None)
    keys = {name: key(name) for name in (*state, *hidden)}
    modules = module.named_modules(remove_duplicate=False)
    hooked = [f"{path}." if path else "" for path, child in modules if has_renaming_hooks(child)]
    hooked += [""] * overrides_loading(module)
    common = _common_of(source, {*keys.values()} - shapes.keys(), shapes, any_tensor=bool(hooked))
    stored = {name: UnreadValue(name, shape) for name, shape in shapes.items()} | {
        name: UnreadValue(name, tuple(value.shape) if isinstance(value, torch.Tensor) else None, common=True)
        for name, value in common.items()
    }
    entries = stored_by_name(keys, key, stored, hooked)
    dtypes = {name: value.dtype for name, value in extras.items() if isinstance(value, torch.Tensor)}
    state_walk = Walk(partial(read_value, source, common, tensors, dtypes), partial(fill_alone, source, common))
    labels = {name: keys[other] for name, other in other_names.items() if other is not None}
    return _Loading(module, keys | labels, extras, hidden, entries, common, state_walk)


def _common_of(source: ModuleSource, lacking: set[str], shapes: Shapes, *, any_tensor: bool) -> dict[str, Any]:
    """Return the values of the common state that the module may need, by key.

    Args:
        source: Checkpoint, and how to read it.
        lacking: Keys of the module's values that no shard has.
        shapes: Shapes of stored tensors, and None for objects, by stored key.
        any_tensor: Whether all tensors of the common state are returned, since a hook may ask for names that aren't
            known yet.
    """
    if not (lacking or any_tensor):
        return {}

    def wanted(name: str, value: Any) -> bool:
        return name in lacking or (any_tensor and name not in shapes and isinstance(value, torch.Tensor))

    return common_values(source, wanted, [name for name, shape in shapes.items() if shape is not None])


def _load_hooked(loading: _Loading) -> None:
    """Walk over the module: let modules with hooks of their own load themselves, and record the loads of the others.

    Raises:
        ShapeError: A module's own `load_state_dict` reports errors.
    """
    module, state = loading.module, loading.walk
    if overrides_loading(module):
        load_by_override(module, loading.entries, state)
    else:
        walk(module, dict(loading.entries), "", state)
    if state.errors:
        heading = "load_module: the module's own load_state_dict refuses what is stored"
        fix = "Load into a module with the sizes and hooks of the saved one."
        raise ShapeError(error_text(heading, offenders=state.errors, fix=fix))


def _report(loading: _Loading, found: IncompatibleKeys, shapes: Shapes, *, strict: bool) -> ModuleKeys:
    """Return the keys that only the module or only the checkpoint has.

    Args:
        loading: Load whose names are matched.
        found: Names that the walk over the module reports as missing or unexpected.
        shapes: Shapes of stored tensors, and None for objects, by stored key.
        strict: Whether missing values raise KeyMismatch.
    """
    extras = loading.extras
    # Torch itself reports missing extra states, and hooks may have changed its report.
    others = (name for name in extras if name.rpartition(".")[2] != EXTRA_STATE)
    absent = {name: loading.keys[name] for name in others if name not in loading.entries}
    if found.missing_keys:
        absent |= unfilled(dict(all_tensors(loading.module)), found.missing_keys, loading.keys)
    empty = {name for name in absent if name in extras and not has_elements(extras[name])}
    missing = {key: name for name, key in absent.items() if name not in empty}
    kept = {absent[name] for name in empty} | {loading.keys[name] for name in loading.walk.kept}
    if strict:
        unknown = sorted(loading.keys[name] for name in found.unexpected_keys if name in extras)
        if unknown:
            heading = "load_module: the module's state_dict has entries that its load_state_dict does not take"
            fix = (
                "Register a hook that takes them with register_load_state_dict_pre_hook, or pass strict=False to "
                "load the module without them."
            )
            raise KeyMismatch(error_text(heading, offenders=unknown, fix=fix))
        _refuse_missing(missing, loading, shapes)
    return ModuleKeys(tuple(sorted(missing)), _unused(loading, found.unexpected_keys, shapes), tuple(sorted(kept)))


def _refuse_missing(missing: Mapping[str, str], loading: _Loading, shapes: Shapes) -> None:
    if missing:
        stored_keys = sorted(name for name, shape in shapes.items() if shape is not None)
        found = f"{len(stored_keys)} stored keys, such as {', '.join(stored_keys[:3])}"
        fix = "Tie again the weights that to_empty() untied, map names to stored keys by key=, or pass strict=False."
        offenders = [
            f"{key} (which a hook leaves out of state_dict)" if name in loading.hidden else key
            for key, name in sorted(missing.items())
        ]
        error = KeyMismatch(
            error_text("load_module: module keys without a stored value", offenders=offenders, found=found, fix=fix)
        )
        error.unexpected = tuple(sorted(missing))
        raise error


def _unused(loading: _Loading, unexpected: Iterable[str], shapes: Shapes) -> tuple[str, ...]:
    """Return the sorted keys of stored tensors that the module doesn't use.

    The module has no name for such a tensor, or its loading has reported the name as unexpected.

    Args:
        loading: Load whose names are matched.
        unexpected: Names that the module's loading has reported as unexpected.
        shapes: Shapes of stored tensors, and None for objects, by stored key.
    """
    entries, moved = loading.entries, loading.walk.moved
    spare = {moved.get(name) or (entries[name].key if name in entries else name) for name in unexpected}
    tensors = {key for key, shape in shapes.items() if shape is not None}
    others = (shapes.keys() | loading.common.keys()) - tensors
    return tuple(sorted((tensors - {stored.key for stored in entries.values()}) | (spare - others)))
