"""The walk of `torch.nn.Module.load_state_dict` over a module and its children, with hooks run in the same order.

For a module without load hooks of its own, the walk records which stored values go into which tensors. These tensors
are filled later, all at once, and each rank reads only the bytes of its own part. Any other module runs its own loading
code, on a state dict that reads a value at the first access.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ...errors import CheckpointingException, error_text
from ._module_hooks import is_of_fsdp2, loads_itself, name_of, own_hooks
from ._module_names import Fill, Tensors, UnreadValue, own_tensors

Read = Callable[[torch.nn.Module, str, UnreadValue], Any]
"""Function that reads a stored value, which a module's own loading asks for by a name."""

EXTRA_STATE = "_extra_state"


if TYPE_CHECKING:
    _State = OrderedDict[str, Any]
else:
    # Hooks may check for either class. The methods of MutableMapping read values by `__getitem__` alone.
    class _State(MutableMapping, OrderedDict):
        pass


class StoredState(_State):
    """A state dict that reads a stored value at the first access, and keeps it, since hooks may change it in place.

    Examples:
        >>> state = StoredState({"w": UnreadValue("w", (2,)), "b": 1}, lambda name, stored: f"{name} was read")
        >>> "w" in state, state["w"], dict(state)
        (True, 'w was read', {'w': 'w was read', 'b': 1})
    """

    def __init__(self, entries: Any = (), read: Callable[[str, UnreadValue], Any] | None = None) -> None:
        super().__init__()
        self._read = read
        for name, entry in dict(entries).items():
            self[name] = entry

    def __getitem__(self, name: str) -> Any:
        value = OrderedDict.__getitem__(self, name)
        if isinstance(value, UnreadValue) and self._read is not None:
            self[name] = value = self._read(name, value)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        OrderedDict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        OrderedDict.__delitem__(self, name)

    def __contains__(self, name: object) -> bool:
        return OrderedDict.__contains__(self, name)

    # With its own iterator, `dict(state)` and `{**state}` ask for each value instead of copying unread ones.
    def __iter__(self) -> Iterator[str]:
        return OrderedDict.__iter__(self)

    def __reversed__(self) -> Iterator[str]:
        return OrderedDict.__reversed__(self)

    def __len__(self) -> int:
        return OrderedDict.__len__(self)

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        """Return the values as an ordinary state dict, after reading all of them."""
        return OrderedDict(self.items())

    def __reduce__(self) -> Any:
        return OrderedDict, ([*self.items()],)

    def entries(self) -> dict[str, Any]:
        """Return the values by name without reading any: a value that is not read yet is an `UnreadValue`."""
        return {name: OrderedDict.__getitem__(self, name) for name in self}


class IncompatibleKeys(NamedTuple):
    """The lists of missing and unexpected keys that torch passes to post-hooks. A hook may change the lists."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    """The recorded load of one module without hooks of its own.

    Attributes:
        module: The module.
        prefix: Prefix of the names of the module's entries.
        fills: Tensors of the module with the stored values that go into them.
        extra: Stored value for `set_extra_state`; None if there is none.
        missing: Names that `load_state_dict` reports as missing.
        unexpected: Names that `load_state_dict` reports as unexpected.
    """

    module: torch.nn.Module
    prefix: str
    fills: list[Fill]
    extra: UnreadValue | None
    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class _PostHook:
    """A hook that runs after a module and its children are filled."""

    module: torch.nn.Module
    prefix: str
    hook: Callable[[torch.nn.Module, IncompatibleKeys], object]


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The state of a walk: recorded loads and hooks that are still to run, and the names to report.

    Attributes:
        read: Function that reads a stored value for a module that loads itself.
        fill: Function that fills tensors on this rank alone, before a hook runs that may look at them.
        pending: Recorded loads and post-hooks that are still to run, in torch's order.
        missing: Names of the module that the state dict lacks; pending loads add theirs when they are settled.
        unexpected: Names in the state dict that the module lacks; pending loads add theirs when they are settled.
        errors: Error messages of modules that loaded themselves.
        moved: Stored key of each unexpected name; the two differ if a hook has moved the value to another name.
        kept: Names of buffers that keep their values, although they are not stored, without being reported as missing.
    """

    read: Read
    fill: Callable[[Sequence[Fill]], None]
    pending: list[_Visit | _PostHook] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


def walk(module: torch.nn.Module, entries: dict[str, Any], prefix: str, state: Walk) -> None:
    """Walk over a module and its children, in torch's order, and record which stored values they load.

    A module with load hooks of its own loads its tensors during the walk; other loads stay pending.

    Args:
        module: The module.
        entries: Values by name, each an `UnreadValue` or a value that a hook has put there. The dict is emptied, so
            that values are freed early.
        prefix: Prefix of the names of the module's entries, such as ``layers.0.``.
        state: Walk that receives the records.

    Raises:
        CheckpointingException: A hook raises, or a value that it asks for can't be read.
    """
    tensors = dict(own_tensors(module, prefix))
    if loads_itself(module, entries, prefix) or _must_load_itself(tensors, entries, prefix):
        _, below = _split(_load_itself(module, entries, prefix, state), prefix)
    else:
        with _naming(module, prefix, ["torch's hook"]):
            for hook in module._load_state_dict_pre_hooks.values():
                hook(entries, prefix, {}, True, [], [], [])
        direct, below = _split(entries, prefix)
        state.pending.append(_visit(module, tensors, direct, below, prefix, state))
    entries.clear()  # so that a child's values are freed when it has taken them
    for name, child in module._modules.items():
        if child is not None:
            walk(child, below.pop(name, {}), f"{prefix}{name}.", state)
    hooks = module._load_state_dict_post_hooks.values()
    state.pending.extend(_PostHook(module, prefix, hook) for hook in hooks)


def settle(state: Walk, fill: Callable[[Sequence[Fill]], None]) -> None:
    """Fill the tensors of pending loads, then call `set_extra_state` and post-hooks, in torch's order.

    Args:
        state: Walk with the pending loads and hooks; none is pending afterwards.
        fill: Function that fills all of the tensors at once.
    """
    pending = [*state.pending]
    state.pending.clear()
    fill(fills_of(pending))
    for step in pending:
        if isinstance(step, _Visit):
            if step.extra is not None:
                value = state.read(step.module, f"{step.prefix}{EXTRA_STATE}", step.extra)
                with _naming(step.module, step.prefix, ["set_extra_state"]):
                    step.module.set_extra_state(value)
            state.missing.extend(step.missing)
            state.unexpected.extend(step.unexpected)
            continue
        with _naming(step.module, step.prefix, [name_of(step.hook)]):
            if step.hook(step.module, IncompatibleKeys(state.missing, state.unexpected)) is not None:
                raise TypeError("a post-hook may change the lists of keys, but must not return anything")


def fills_of(pending: Iterable[_Visit | _PostHook]) -> list[Fill]:
    """Return the tensors that the pending loads fill, each with its stored value."""
    return [fill for step in pending if isinstance(step, _Visit) for fill in step.fills]


def foreseen(state: Walk) -> IncompatibleKeys | None:
    """Return the missing and unexpected keys that the load will report in the end.

    The result is None if a pending post-hook, other than one of FSDP2's, may change these lists.
    """
    hooks = (step for step in state.pending if isinstance(step, _PostHook))
    if any(not is_of_fsdp2(step.hook) for step in hooks):
        return None
    visits = [step for step in state.pending if isinstance(step, _Visit)]
    missing = [name for visit in visits for name in visit.missing]
    unexpected = [name for visit in visits for name in visit.unexpected]
    return IncompatibleKeys([*state.missing, *missing], [*state.unexpected, *unexpected])


def load_by_override(module: torch.nn.Module, entries: Mapping[str, UnreadValue], state: Walk) -> None:
    """Call a module's override of `load_state_dict`, and record the keys that it reports.

    Args:
        module: Module whose class overrides `load_state_dict`.
        entries: Stored values by name; the override may read any of them.
        state: Walk that receives the reported keys, or torch's error message if stored tensors have wrong sizes.
    """
    state_dict = StoredState(entries, lambda name, stored: state.read(module, name, stored))
    accepted = signature(module.load_state_dict).parameters
    lenient = "strict" in accepted or any(value.kind is Parameter.VAR_KEYWORD for value in accepted.values())
    with _naming(module, "", [name_of(module.load_state_dict)]):
        try:
            keys = module.load_state_dict(state_dict, **({"strict": False} if lenient else {}))
        except RuntimeError as error:  # torch's error for tensors of other sizes
            state.errors.append(str(error))
            return
    state.missing.extend(getattr(keys, "missing_keys", ()))
    state.unexpected.extend(getattr(keys, "unexpected_keys", ()))


# One module


def _must_load_itself(tensors: Tensors, entries: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a module must load itself although it has no hooks.

    It must if a hook of another module has replaced one of its stored values, or if a tensor without axes is stored
    with the shape (1,), which torch's own loading accepts.
    """
    return any(
        not isinstance(entries[name], UnreadValue)
        or (entries[name].shape == (1,) and not is_lazy(tensor) and not tensor.dim())
        for name, tensor in tensors.items()
        if name in entries
    ) or not isinstance(entries.get(f"{prefix}{EXTRA_STATE}", UnreadValue("", None)), UnreadValue)


def _load_itself(module: torch.nn.Module, entries: dict[str, Any], prefix: str, state: Walk) -> dict[str, Any]:
    """Let a module load its own tensors, and return `entries` with the changes that its hooks have made.

    Args:
        module: The module.
        entries: Values for the module and its children, by name.
        prefix: Prefix of the names of the module's entries.
        state: Walk that receives the reported keys and errors. Its pending loads are settled first.
    """
    settle(state, state.fill)  # since the module's hooks may look at tensors that come before
    state_dict = StoredState(entries, lambda name, stored: state.read(module, name, stored))
    with _naming(module, prefix, own_hooks(module)):
        module._load_from_state_dict(state_dict, prefix, {}, True, state.missing, state.unexpected, state.errors)
    return state_dict.entries()


def _split(entries: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a module's own entries by name, and its children's entries as a dict for each child's name."""
    direct: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, entry in entries.items():
        child, dot, _ = name[len(prefix) :].partition(".")
        if name.startswith(prefix):
            (below[child] if dot else direct)[name] = entry
    return direct, below


def _visit(
    module: torch.nn.Module,
    tensors: Tensors,
    direct: Mapping[str, Any],
    below: Mapping[str, Mapping[str, Any]],
    prefix: str,
    state: Walk,
) -> _Visit:
    """Return a record of the tensors that torch's `_load_from_state_dict` would fill, and the keys it would report.

    Args:
        module: The module.
        tensors: Parameters and persistent buffers of the module itself, by name.
        direct: Values for the module itself, by name.
        below: Values for each of its children, by the child's name.
        prefix: Prefix of the names of the module's entries.
        state: Walk that receives the stored keys of unexpected entries, and the names of buffers that keep their
            values.
    """
    extra = f"{prefix}{EXTRA_STATE}"
    takes_extra = type(module).set_extra_state is not torch.nn.Module.set_extra_state
    fills = [
        Fill(name, tensor, direct[name])
        for name, tensor in tensors.items()
        if name in direct and _fits(tensor, direct[name])
    ]
    missing = [*(tensors.keys() - {fill.name for fill in fills})] + [extra] * (takes_extra and extra not in direct)
    counter = f"{prefix}num_batches_tracked"
    # Checkpoints of torch 0.3 had no counter, and torch takes checkpoints without a version for such.
    if isinstance(module, _NormBase) and module.track_running_stats and counter in missing and counter not in direct:
        missing.remove(counter)
        state.kept.append(counter)
    strangers = [entries for child, entries in below.items() if child not in module._modules]
    known = tensors.keys() | ({extra} if takes_extra else set())
    strangers.append({name: direct[name] for name in direct.keys() - known})
    unexpected = {name: entry for entries in strangers for name, entry in entries.items()}
    state.moved.update((name, entry.key) for name, entry in unexpected.items() if isinstance(entry, UnreadValue))
    return _Visit(module, prefix, fills, direct.get(extra) if takes_extra else None, missing, [*unexpected])


def _fits(tensor: torch.Tensor, stored: UnreadValue) -> bool:
    """Return whether a stored value is a tensor that can fill one of the module's.

    A DTensor is filled only from shards, not from the common state.
    """
    return stored.shape is not None and not (stored.common and hasattr(tensor, "placements"))


@contextmanager
def _naming(module: torch.nn.Module, prefix: str, hooks: Sequence[str]) -> Iterator[None]:
    """Name the module and its hooks in any exception that is raised inside."""
    where = f"{', '.join(hooks) or 'load_state_dict'} of {prefix[:-1] or 'the module'} ({type(module).__name__})"
    try:
        yield
    except CheckpointingException as error:
        error.add_note(f"asked for by {where}")
        raise
    except Exception as error:
        fix = "Load a checkpoint that the function accepts, or correct the function."
        found = f"{type(error).__name__}: {error}"
        heading = f"load_module: {where} raised an error; the module may be partly overwritten"
        raise CheckpointingException(error_text(heading, found=found, fix=fix)) from error
