"""DeepSpeed's Universal Checkpoint, written from a checkpoint of any format, without DeepSpeed."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from ..conversion import left_out_keys
from ..core.lazy import LazyTensor
from ..core.mapping import ShardedTensor
from ..errors import AlreadyACheckpoint, KeyMismatch, UnsupportedValue, error_text
from ..formats.archives import StreamedTensor, streamed_archive
from ..inspection import OpenCheckpoint
from ..shell.checkpoint import is_checkpoint
from ..shell.storage import Directory, Storage, locked, make_folder, storage_at, tensor_buffers
from ..shell.table import alone_in

__all__ = ["save_universal"]

_STATE = re.compile(r"optimizer\.state\.(?P<state>[^.]+)\.(?P<parameter>.+)", re.DOTALL)
_MASTER, _STEP = "param", "step"

_MODEL_FIELDS: dict[str, Any] = {
    # DeepSpeed requires these fields of a model file; a checkpoint that it saved has them in the common state.
    **dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd")),
    **dict.fromkeys(("frozen_param_shapes", "frozen_param_fragments")),
    "buffer_names": [],
    "shared_params": {},
    "ds_config": {},
    **dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), 0),
    **dict.fromkeys(("dp_world_size", "mp_world_size"), 1),
    "ds_version": "0.19.8",
}


def save_universal(
    checkpoint: OpenCheckpoint,
    folder: Directory,
    *,
    tag: str = "universal",
    stage: Literal[1, 2, 3] = 1,
    parameter_groups: Sequence[Sequence[str]] | None = None,
    common: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
    durable: bool = True,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a checkpoint's model and optimizer states as DeepSpeed's `ds_to_universal` does; not collective.

    Tensors are read and written a few MiB at a time. `latest_universal` comes last: until then there is no checkpoint.

    Args:
        checkpoint: Opened checkpoint of any format. The keys of states are `optimizer.state.<state>.<parameter>`, with
            `param` for the float32 master; a parameter without a master gets its weight in float32.
        folder: Root folder for DeepSpeed's `load_checkpoint` with `load_universal`.
        tag: Name of the checkpoint's own folder in the root.
        stage: ZeRO stage of the job that will load it: under stage 3 DeepSpeed looks for a model file of another name.
        parameter_groups: Names of the trained parameters of each of the optimizer's groups, if there are several.
        common: Dict that replaces the checkpoint's common state in the model file. Its `optimizer` may
            contain only `param_groups`. Values that DeepSpeed needs and the dict lacks get a default.
        leave_out: Patterns of keys that aren't written. Any other key without a place in the format is an error.
        durable: Whether all files are on the medium before the checkpoint counts.
        progress: Function that is called with the number of bytes written since its last call.

    Raises:
        AlreadyACheckpoint: The folder has a checkpoint.
        StorageError: Another save to the folder is in progress, or a file can't be written.
        KeyMismatch: The parameter of a state is missing, a pattern matches nothing, or a key has no place in the
            format.
        UnsupportedValue: A name can't be a folder's name, or the common state can't be stored.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> source, root = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> tree = {"w": torch.ones(2), "optimizer.state.exp_avg.w": torch.zeros(2)}
        >>> shards = {key: st.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tree.items()}
        >>> st.save({**shards, "optimizer": {"param_groups": [{"lr": 0.1, "step": 3}]}}, source)
        >>> save_universal(st.open_checkpoint(source), root)
        >>> [key for key in st.open_checkpoint(root) if "state" in key]  # doctest: +NORMALIZE_WHITESPACE
        ['optimizer.state.exp_avg.w', 'optimizer.state.param.w', 'optimizer.state.step.w']

    References:
        deepspeed.checkpoint.ds_to_universal, DeepSpeed 0.19.8.
    """
    storage = storage_at(folder)
    _check_free(storage)
    parts = _parts(checkpoint, leave_out)
    _check_names([tag, *parts.weights])
    plain = checkpoint.common() if common is None else common
    model, optimizer = _fields(checkpoint, plain, parts, parameter_groups)
    model_file = f"{tag}/{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_model_states.pt"
    write = partial(_write, storage, durable, progress or (lambda _: None))
    with alone_in(storage):
        _check_free(storage)  # again, since another call may have finished meanwhile
        _write_states(checkpoint, parts, optimizer, f"{tag}/zero", partial(_make_folder, storage, durable), write)
        module: OrderedDict[str, Any] = OrderedDict((name, _stream(checkpoint, name)) for name in parts.weights)
        module.update(model.pop("module", {}))
        write(model_file, {"module": module, **model})
        with locked(storage):
            _check_free(storage)
            storage.replace("latest_universal", tag.encode(), durable=durable)


def _check_free(storage: Storage) -> None:
    if is_checkpoint(storage):
        heading = f"save_universal: {storage.where()!r} already holds a checkpoint"
        raise AlreadyACheckpoint(error_text(heading, fix="Write to another folder."))


def _write_states(
    checkpoint: OpenCheckpoint,
    parts: _Parts,
    optimizer: Mapping[str, Any],
    folder: str,
    make: Callable[[str], None],
    write: Callable[[str, Any], None],
) -> None:
    make(folder)
    groups = optimizer["param_groups"]
    for name in parts.weights:
        make(f"{folder}/{name}")
        for file, value in _state_files(checkpoint, parts, name, groups):
            write(f"{folder}/{name}/{file}.pt", value)
    # Groups and one step are written twice, since DeepSpeed's ZeRO-3 looks for them elsewhere than ZeRO-1 and 2.
    step = next((_step(checkpoint, parts, name, groups) for name in parts.states), None)
    inner = {"state": {} if step is None else {0: {_STEP: step}}, "param_groups": groups}
    write(f"{folder}/optimizer_state.pt", {**optimizer, "optimizer_state_dict": inner})


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Keys of the tensors that are written to a universal checkpoint.

    Attributes:
        weights: Keys of the model's tensors.
        states: Names of each trained parameter's optimizer states, such as "exp_avg", by the parameter's key.
    """

    weights: list[str]
    states: dict[str, list[str]] = field(default_factory=dict)


def _tensor(checkpoint: OpenCheckpoint, key: str) -> ShardedTensor:
    shard = checkpoint.metadata[key]
    assert isinstance(shard, ShardedTensor)
    return shard


def _parts(checkpoint: OpenCheckpoint, leave_out: Sequence[str]) -> _Parts:
    left_out = {*left_out_keys("save_universal", checkpoint.metadata, leave_out)}
    states: dict[str, list[str]] = {}
    weights, homeless = [], []
    for key in (key for key in checkpoint if key not in left_out):
        match = _STATE.fullmatch(key)
        if not isinstance(checkpoint.metadata[key], ShardedTensor) or (not match and key.startswith("optimizer.")):
            homeless.append(f"{key!r}: not a tensor of the model, nor a parameter's state")
        elif match:
            states.setdefault(match["parameter"], []).append(match["state"])
        else:
            weights.append(key)
    homeless += [f"'optimizer.state.*.{name}': there is no parameter {name!r}" for name in states.keys() - set(weights)]
    if homeless:
        heading = (
            f"save_universal: keys of {checkpoint.checkpoint.storage.where()!r} that a universal checkpoint cannot hold"
        )
        raise KeyMismatch(error_text(heading, offenders=sorted(homeless), fix="List these keys in leave_out=."))
    return _Parts(weights, states)


def _check_names(names: Sequence[str]) -> None:
    unfit = ("", ".", "..", "optimizer_state.pt")
    wrong = [repr(name) for name in names if "/" in name or "\\" in name or name in unfit]
    if wrong:
        heading = "save_universal: these names, of the tag or of parameters, cannot be names of folders"
        fix = "Pass another tag=; rename parameters by converting the checkpoint first."
        raise UnsupportedValue(error_text(heading, offenders=wrong, fix=fix))


def _fields(
    checkpoint: OpenCheckpoint, common: Any, parts: _Parts, parameter_groups: Sequence[Sequence[str]] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plain values for the model file, and those for the optimizer's file.

    Raises:
        UnsupportedValue: The common state isn't a dict, or its `optimizer` isn't a dict with only `param_groups`.
        KeyMismatch: `parameter_groups` doesn't name each trained parameter once.
    """
    optimizer = common.get("optimizer", {}) if isinstance(common, Mapping) else None
    if not isinstance(optimizer, Mapping) or optimizer.keys() - {"param_groups"}:
        found = "no dict" if optimizer is None else f"'optimizer' with the keys {', '.join(map(repr, optimizer))}"
        fix = "Pass such a dict, with the values to write, as common=."
        expected = "a dict whose 'optimizer', if any, is a dict with only 'param_groups'"
        heading = "save_universal: unusable common state"
        raise UnsupportedValue(error_text(heading, found=found, expected=expected, fix=fix))
    groups = [dict(group) for group in optimizer.get("param_groups", ())]
    names = [list(parts.states)] if parameter_groups is None else [list(group) for group in parameter_groups]
    counts = Counter(name for group in names for name in group)
    wrong = [repr(name) for name in {*counts, *parts.states} if counts[name] != (name in parts.states)]
    if wrong:
        what = "save_universal: parameter_groups does not name each trained parameter once"
        fix = "Name in parameter_groups each parameter that has optimizer states, once, and no other."
        raise KeyMismatch(error_text(what, offenders=sorted(wrong), fix=fix))
    model = {**_MODEL_FIELDS, **{key: value for key, value in common.items() if key != "optimizer"}}
    new_groups = [{**group, "params": [number]} for number, group in enumerate(groups)]
    shapes = [OrderedDict((n, torch.Size(_tensor(checkpoint, n).global_shape)) for n in group) for group in names]
    return model | {"param_shapes": shapes}, {"param_groups": new_groups, "ds_version": model["ds_version"]}


def _state_files(
    checkpoint: OpenCheckpoint, parts: _Parts, name: str, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield the name, without suffix, and the content of each file in a tensor's folder."""
    states = parts.states.get(name)
    if states is None:  # a buffer, frozen parameter or tied name: written in float32, as by ds_to_universal
        if not _tensor(checkpoint, name).dtype.is_complex:
            yield "fp32", {"param": _stream(checkpoint, name, torch.float32)}
        return
    master = f"optimizer.state.{_MASTER}.{name}" if _MASTER in states else name
    yield "fp32", {"param": _stream(checkpoint, master, torch.float32), "cat_dim": 0}
    for state in states:
        key = f"optimizer.state.{state}.{name}"
        if state not in (_STEP, _MASTER):
            yield state, {"param": _stream(checkpoint, key), "cat_dim": 0}
    step = _step(checkpoint, parts, name, groups)
    if step is not None:
        yield _STEP, step


def _step(
    checkpoint: OpenCheckpoint, parts: _Parts, name: str, groups: Sequence[Mapping[str, Any]]
) -> torch.Tensor | None:
    """Return a parameter's step count: its own state, or else the step in the optimizer's groups (Megatron-Core's way).

    It is None if neither is stored, or if the groups have different steps.
    """
    if _STEP in parts.states[name]:
        return _lazy(checkpoint, f"optimizer.state.{_STEP}.{name}").read()
    steps = {float(group["step"]) for group in groups if "step" in group}
    return torch.tensor(steps.pop(), dtype=torch.float32, device="cpu") if len(steps) == 1 else None


def _lazy(checkpoint: OpenCheckpoint, key: str) -> LazyTensor:
    data: LazyTensor = checkpoint[key].data
    return data


def _stream(checkpoint: OpenCheckpoint, key: str, dtype: torch.dtype | None = None) -> StreamedTensor:
    data = _lazy(checkpoint, key)
    if dtype is not None:
        data = data.to(dtype)
    return StreamedTensor(data.dtype, tuple(data.shape), partial(tensor_buffers, data))


def _write(storage: Storage, durable: bool, progress: Callable[[int], None], name: str, value: Any) -> None:
    def buffers() -> Iterator[memoryview]:
        for buffer in streamed_archive(value):
            yield buffer
            progress(buffer.nbytes)

    storage.remove(name)  # the file of an interrupted call
    storage.write(name, buffers(), durable=durable)


def _make_folder(storage: Storage, durable: bool, name: str) -> None:
    make_folder(storage, name, durable=durable)
