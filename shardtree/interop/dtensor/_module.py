"""`load_module`: a checkpoint's tensors go into a module's parameters and buffers by their names, however it is cut."""

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
    """Keys that only one of a module and a checkpoint has.

    Attributes:
        missing: Stored keys, sorted, of the module's tensors that aren't stored and keep their values; also names that
            a hook reports.
        unused: Keys, sorted, of stored tensors that the module has no name for or its `load_state_dict` doesn't take.
        kept: Keys, sorted, of other values that aren't stored and stay: extra states without tensors, and the counter
            that a batch norm of an old checkpoint lacks.
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
    tensor (tied weights) need one stored tensor; where more are stored, they have to be equal. What isn't stored as a
    tensor of its own is looked for in the common state, where plain buffers and extra states may be. Buffers that
    `state_dict` leaves out (``persistent=False``) keep their values. If it fails, what the module holds is lost.

    Hooks do what they do in ``module.load_state_dict(...)`` of what is stored. A module with load pre-hooks or a
    `_load_from_state_dict` of its own loads itself, from a state dict that reads a tensor when its value is asked for:
    as a DTensor with the placements of the module's own, or whole, on the CPU. Of its children it reads what the hook
    asks for. Post-hooks and setters of extra states are called when the tensors before them are filled. The hooks of
    torch that look at no element, as FSDP2's, cost nothing. If `module` overrides `load_state_dict`, that is called,
    and may read everything that is stored.

    Args:
        module: with memory on any device: after ``module.to_empty(device=...)`` if it was made on the meta device, and
            with its weights tied again, which that takes apart.
        checkpoint_dir: a path or URL that all ranks see, or a `Storage`.
        key: returns the stored key for a name of the module's `state_dict`; by default they are the same. Tensors with
            one stored key are all filled with it, if they are of one size and cut alike.
        strict: whether a tensor that isn't stored, or isn't taken by the module's own `load_state_dict`, is an error,
            and what hooks report as missing. If False, the module keeps its values; its key is returned.
        cast: whether what is stored in another dtype is converted, as `load` does; else it is an error. Hooks get a
            parameter's values in the dtype that is stored.
        plain: patterns of stored keys of values that need no scales, as for `load`.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        within: the DeviceMesh whose ranks all hold this module, as for `from_dtensors`. Plain tensors are taken to be
            whole on each rank.
        strided: the meaning of a `_StridedShard`, as for `from_dtensors`.
        strategies: the dispatch table; None for the process's.
        options: Options of the load.

    Returns:
        The keys that only one of the two has.

    Raises:
        KeyMismatch: a tensor has no name that is stored, or the module doesn't take it, and `strict` is True; or `key`
            returns one stored key for tensors that differ in size, dtype or placements.
        UnsupportedValue: the module is on the meta device, or has parameters that aren't initialised yet.
        MetadataError: the module has plain tensors, and this rank isn't in the mesh `within`.
        IntegrityError: a tensor's several names are stored with different values.
        ShapeError: what is stored doesn't fit the module, or its own `load_state_dict` refuses it; or quantised values
            would be cast without their scales.
        CheckpointingException: what `load` raises; or a hook raises, which is named.

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
        found = IncompatibleKeys(loading.walk.missing, loading.walk.unexpected)
        return _report(loading, found, shapes, strict=strict)

    return agree(ranks, "load_module: load the rest", finish)


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """A module, and what is stored for it.

    Attributes:
        module: the module.
        keys: stored keys by name, for names of `state_dict` and those that `load_state_dict` looks for.
        rest: entries of its `state_dict` that are neither parameters nor buffers, by name.
        hidden: names of parameters and buffers that a hook leaves out of `state_dict`.
        entries: what is stored, by name.
        common: values of the common state, by stored key.
        walk: what is done with the entries.
    """

    module: torch.nn.Module
    keys: Mapping[str, str]
    rest: Mapping[str, Any]
    hidden: frozenset[str]
    entries: Mapping[str, UnreadValue]
    common: Mapping[str, Any]
    walk: Walk


def _begin(module: torch.nn.Module, source: ModuleSource, key: Callable[[str], str], shapes: Shapes) -> _Loading:
    """Return the state of a load into a module that has matched names and read no tensor yet."""
    state = module.state_dict(keep_vars=True)
    every = dict(all_tensors(module))
    tensors = {name: tensor for name, tensor in every.items() if not is_lazy(tensor)}
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        fix = "Call module.to_empty(device=...) first, and set the buffers that state_dict leaves out."
        raise UnsupportedValue(error_text("load_module: tensors without memory (meta)", offenders=meta, fix=fix))
    own = {*map(id, every.values())}
    rest = {name: value for name, value in state.items() if id(value) not in own}
    # A hook may give tensors other names in `state_dict`, or leave them out.
    shown = {id(value): name for name, value in state.items()}
    other_names = {name: shown.get(id(tensor)) for name, tensor in tensors.items() if name not in state}
    hidden = frozenset(name for name, other in other_names.items() if other is None)
    keys = {name: key(name) for name in (*state, *hidden)}
    modules = module.named_modules(remove_duplicate=False)
    hooked = [f"{path}." if path else "" for path, each in modules if has_renaming_hooks(each)]
    hooked += [""] * overrides_loading(module)
    common = _common_of(source, {*keys.values()} - shapes.keys(), shapes, any_tensor=bool(hooked))
    stored = {name: UnreadValue(name, shape) for name, shape in shapes.items()} | {
        name: UnreadValue(name, tuple(value.shape) if isinstance(value, torch.Tensor) else None, common=True)
        for name, value in common.items()
    }
    entries = stored_by_name(keys, key, stored, hooked)
    dtypes = {name: value.dtype for name, value in rest.items() if isinstance(value, torch.Tensor)}
    state_walk = Walk(partial(read_value, source, common, tensors, dtypes), partial(fill_alone, source, common))
    labels = {name: keys[other] for name, other in other_names.items() if other is not None}
    return _Loading(module, keys | labels, rest, hidden, entries, common, state_walk)


def _common_of(source: ModuleSource, lacking: set[str], shapes: Shapes, *, any_tensor: bool) -> dict[str, Any]:
    """Return the values of the common state that the module lacks; any tensor, where hooks know other names."""
    if not (lacking or any_tensor):
        return {}

    def wanted(name: str, value: Any) -> bool:
        return name in lacking or (any_tensor and name not in shapes and isinstance(value, torch.Tensor))

    return common_values(source, wanted, [name for name, shape in shapes.items() if shape is not None])


def _load_hooked(loading: _Loading) -> None:
    """Have modules with hooks of their own load themselves, and note what the others take."""
    module, state = loading.module, loading.walk
    if overrides_loading(module):
        load_by_override(module, loading.entries, state)
    else:
        walk(module, dict(loading.entries), "", state)
    if state.errors:
        what = "load_module: the module's own load_state_dict refuses what is stored"
        fix = "Load into a module of the same sizes, with the same hooks."
        raise ShapeError(error_text(what, offenders=state.errors, fix=fix))


def _report(loading: _Loading, found: IncompatibleKeys, shapes: Shapes, *, strict: bool) -> ModuleKeys:
    """Return the keys without a counterpart, or raise if they are an error."""
    rest = loading.rest
    # Of extra states torch itself says whether they are missing, and hooks may have changed that.
    others = (name for name in rest if name.rpartition(".")[2] != EXTRA_STATE)
    absent = {name: loading.keys[name] for name in others if name not in loading.entries}
    if found.missing_keys:
        absent |= unfilled(dict(all_tensors(loading.module)), found.missing_keys, loading.keys)
    empty = {name for name in absent if name in rest and not has_elements(rest[name])}
    missing = {key: name for name, key in absent.items() if name not in empty}
    kept = {absent[name] for name in empty} | {loading.keys[name] for name in loading.walk.kept}
    if strict:
        unknown = sorted(loading.keys[name] for name in found.unexpected_keys if name in rest)
        if unknown:
            what = "load_module: the module's own load_state_dict doesn't know what is stored: nothing of it was loaded"
            expected = "a load hook that undoes what the state_dict hook does"
            fix = "Register it (register_load_state_dict_pre_hook), or pass strict=False."
            raise KeyMismatch(error_text(what, offenders=unknown, expected=expected, fix=fix))
        _refuse_missing(missing, loading, shapes)
    return ModuleKeys(tuple(sorted(missing)), _unused(loading, found.unexpected_keys, shapes), tuple(sorted(kept)))


def _refuse_missing(missing: Mapping[str, str], loading: _Loading, shapes: Shapes) -> None:
    if missing:
        stored_keys = sorted(name for name, shape in shapes.items() if shape is not None)
        found = f"{len(stored_keys)} keys, such as {', '.join(stored_keys[:3])}"
        fix = "Tie weights that to_empty() took apart, map names to stored keys by key=, or pass strict=False."
        offenders = [
            f"{key} (which a hook leaves out of state_dict)" if name in loading.hidden else key
            for key, name in sorted(missing.items())
        ]
        error = KeyMismatch(
            error_text("load_module: not stored, or not in state_dict", offenders=offenders, found=found, fix=fix)
        )
        error.unexpected = tuple(sorted(missing))
        raise error


def _unused(loading: _Loading, unexpected: Iterable[str], shapes: Shapes) -> tuple[str, ...]:
    """Return the keys of stored tensors that the module has no name for; a hook's names, where it made some."""
    entries, moved = loading.entries, loading.walk.moved
    spare = {moved.get(name) or (entries[name].key if name in entries else name) for name in unexpected}
    tensors = {key for key, shape in shapes.items() if shape is not None}
    others = (shapes.keys() | loading.common.keys()) - tensors
    return tuple(sorted((tensors - {stored.key for stored in entries.values()}) | (spare - others)))
