"""The walk of `torch.nn.Module.load_state_dict` over a module, whose own hooks run as they do there.

What a module without hooks of its own takes is noted and filled later, all at once and from the bytes of this rank's
part. Any other module loads itself, from a state dict that reads what it is asked for.
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
"""Reads a stored value that a module's own loading asks for by a name."""

EXTRA_STATE = "_extra_state"


if TYPE_CHECKING:
    _State = OrderedDict[str, Any]
else:
    # Hooks may want either class. The methods of the first one ask for values by `__getitem__` alone.
    class _State(MutableMapping, OrderedDict):
        pass


class StoredState(_State):
    """A state dict whose stored values are read when they are asked for, and kept, since hooks change them in place.

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

    # With its own iterator, `dict(state)` and `{**state}` ask for each value instead of copying what is here.
    def __iter__(self) -> Iterator[str]:
        return OrderedDict.__iter__(self)

    def __reversed__(self) -> Iterator[str]:
        return OrderedDict.__reversed__(self)

    def __len__(self) -> int:
        return OrderedDict.__len__(self)

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        """Return the values as an ordinary state dict."""
        return OrderedDict(self.items())

    def __reduce__(self) -> Any:
        return OrderedDict, ([*self.items()],)

    def entries(self) -> dict[str, Any]:
        """Return the values, and what hasn't been read as `UnreadValue`."""
        return {name: OrderedDict.__getitem__(self, name) for name in self}


class IncompatibleKeys(NamedTuple):
    """The lists that torch gives to hooks, which may change them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    """A module without hooks of its own: what it takes, and what else `load_state_dict` says of it."""

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
    """The state of a walk.

    Attributes:
        read: reads a value for a module's own loading.
        fill: fills tensors on this rank alone, before hooks that may look at them.
        pending: what is filled and called later, in torch's order.
        missing: names that aren't in the state dict.
        unexpected: names that the module doesn't have.
        errors: messages of modules that loaded themselves.
        moved: the stored keys of unexpected names.
        kept: names of buffers that torch lets a module keep.
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
    """Note what a module and its children take of a state dict, in torch's order; those with own hooks load it.

    Args:
        module: the module.
        entries: the state dict, with values of type `UnreadValue` or what a hook made; it is emptied.
        prefix: the beginning of the names of the module's entries.
        state: receives the result.

    Raises:
        CheckpointingException: a hook raises, or what it asks for can't be read.
    """
    tensors = dict(own_tensors(module, prefix))
    if loads_itself(module, entries, prefix) or _is_partly_read(tensors, entries, prefix):
        _, below = _split(_load_itself(module, entries, prefix, state), prefix)
    else:
        with _naming(module, prefix, ["torch's hook"]):
            for hook in module._load_state_dict_pre_hooks.values():
                hook(entries, prefix, {}, True, [], [], [])
        own, below = _split(entries, prefix)
        state.pending.append(_visit(module, tensors, own, below, prefix, state))
    entries.clear()  # so that a child's values are freed when it has taken them
    for name, child in module._modules.items():
        if child is not None:
            walk(child, below.pop(name, {}), f"{prefix}{name}.", state)
    hooks = module._load_state_dict_post_hooks.values()
    state.pending.extend(_PostHook(module, prefix, hook) for hook in hooks)


def settle(state: Walk, fill: Callable[[Sequence[Fill]], None]) -> None:
    """Fill what is pending, then call extra states' setters and post-hooks, in torch's order."""
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
    """Return the fills of the pending visits."""
    return [each for step in pending if isinstance(step, _Visit) for each in step.fills]


def foreseen(state: Walk) -> IncompatibleKeys | None:
    """Return the lists of keys as they will be; None if hooks that are still to come may change them."""
    hooks = (step for step in state.pending if isinstance(step, _PostHook))
    if any(not is_of_fsdp2(step.hook) for step in hooks):
        return None
    visits = [step for step in state.pending if isinstance(step, _Visit)]
    missing = [name for visit in visits for name in visit.missing]
    unexpected = [name for visit in visits for name in visit.unexpected]
    return IncompatibleKeys([*state.missing, *missing], [*state.unexpected, *unexpected])


def load_by_override(module: torch.nn.Module, entries: Mapping[str, UnreadValue], state: Walk) -> None:
    """Call a module's own `load_state_dict`, which may read everything that is stored."""
    given = StoredState(entries, lambda name, stored: state.read(module, name, stored))
    accepted = signature(module.load_state_dict).parameters
    lenient = "strict" in accepted or any(each.kind is Parameter.VAR_KEYWORD for each in accepted.values())
    with _naming(module, "", [name_of(module.load_state_dict)]):
        try:
            found = module.load_state_dict(given, **({"strict": False} if lenient else {}))
        except RuntimeError as error:  # what torch raises for other sizes
            state.errors.append(str(error))
            return
    state.missing.extend(getattr(found, "missing_keys", ()))
    state.unexpected.extend(getattr(found, "unexpected_keys", ()))


# One module


def _is_partly_read(tensors: Tensors, entries: Mapping[str, Any], prefix: str) -> bool:
    """Return whether entries of a module are values that a hook made, or one element for a tensor without axes."""
    return any(
        not isinstance(entries[name], UnreadValue)
        or (entries[name].shape == (1,) and not is_lazy(tensor) and not tensor.dim())
        for name, tensor in tensors.items()
        if name in entries
    ) or not isinstance(entries.get(f"{prefix}{EXTRA_STATE}", UnreadValue("", None)), UnreadValue)


def _load_itself(module: torch.nn.Module, entries: dict[str, Any], prefix: str, state: Walk) -> dict[str, Any]:
    """Have a module load its own tensors, and return the state dict as it left it."""
    settle(state, state.fill)  # its hooks may look at what was before
    given = StoredState(entries, lambda name, stored: state.read(module, name, stored))
    with _naming(module, prefix, own_hooks(module)):
        module._load_from_state_dict(given, prefix, {}, True, state.missing, state.unexpected, state.errors)
    return given.entries()


def _split(entries: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a module's own entries, and those of its children by the child's name."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, entry in entries.items():
        child, dot, _ = name[len(prefix) :].partition(".")
        if name.startswith(prefix):
            (below[child] if dot else own)[name] = entry
    return own, below


def _visit(
    module: torch.nn.Module,
    tensors: Tensors,
    own: Mapping[str, Any],
    below: Mapping[str, Mapping[str, Any]],
    prefix: str,
    state: Walk,
) -> _Visit:
    """Return the visit of a module: the entries that torch's `_load_from_state_dict` takes, and the keys it reports."""
    extra = f"{prefix}{EXTRA_STATE}"
    takes_extra = type(module).set_extra_state is not torch.nn.Module.set_extra_state
    fills = [Fill(name, each, own[name]) for name, each in tensors.items() if name in own and _fits(each, own[name])]
    missing = [*(tensors.keys() - {fill.name for fill in fills})] + [extra] * (takes_extra and extra not in own)
    counter = f"{prefix}num_batches_tracked"
    # Checkpoints of torch 0.3 had none, and those without a version are taken for such.
    if isinstance(module, _NormBase) and module.track_running_stats and counter in missing and counter not in own:
        missing.remove(counter)
        state.kept.append(counter)
    strangers = [entries for child, entries in below.items() if child not in module._modules]
    strangers.append({name: own[name] for name in own.keys() - tensors.keys() - ({extra} if takes_extra else set())})
    unexpected = {name: entry for entries in strangers for name, entry in entries.items()}
    state.moved.update((name, entry.key) for name, entry in unexpected.items() if isinstance(entry, UnreadValue))
    return _Visit(module, prefix, fills, own.get(extra) if takes_extra else None, missing, [*unexpected])


def _fits(tensor: torch.Tensor, stored: UnreadValue) -> bool:
    """Return whether a stored value can be filled into a tensor: plain values of the common state into plain ones."""
    return stored.shape is not None and not (stored.common and hasattr(tensor, "placements"))


@contextmanager
def _naming(module: torch.nn.Module, prefix: str, hooks: Sequence[str]) -> Iterator[None]:
    """Name the module and its hooks in any exception that they raise."""
    where = f"{', '.join(hooks) or 'load_state_dict'} of {prefix[:-1] or 'the module'} ({type(module).__name__})"
    try:
        yield
    except CheckpointingException as error:
        error.add_note(f"asked for by {where}")
        raise
    except Exception as error:
        fix = "Load what the hook expects, or remove it. What the module holds is lost."
        found = f"{type(error).__name__}: {error}"
        raise CheckpointingException(error_text(f"load_module: {where} raised", found=found, fix=fix)) from error
