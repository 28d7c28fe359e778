"""The context of a call: a shield against torch's modes, and a pause of Python's garbage collector.

The modes are states of torch such as the default device, autocast and inference mode.
"""

from __future__ import annotations

import functools
import gc
import typing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

# One type variable replaces a ParamSpec, so that checkers know a decorated function's type before reading its module.
Function = typing.TypeVar("Function", bound=Callable[..., typing.Any])

# A shield against the state of torch around a call, so that results don't depend on it.


def shielded(function: Function) -> Function:
    """Return a function that runs outside of the torch modes of the caller's thread.

    The modes are the default device, other function modes, dispatch modes such as `FakeTensorMode`, autocast and
    inference mode. New tensors are thus ordinary tensors with elements, on the device that the allocation states, and
    arithmetic uses its operands' dtype. Existing tensors stay as they are: an inference tensor that is filled is still
    an inference tensor. The shield doesn't cover global state (the default dtype, deterministic algorithms), so each
    allocation states its dtype.

    Examples:
        >>> with torch.device("meta"), torch.inference_mode():
        ...     made = shielded(torch.zeros)(2)
        >>> made, made.is_inference()
        (tensor([0., 0.]), False)
    """

    @functools.wraps(function)
    def call(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
        if not (modes or torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled()):
            return function(*args, **kwargs)
        with _without_modes():
            return function(*args, **kwargs)

    return typing.cast(Function, call)


@contextmanager
def _without_modes() -> Iterator[None]:
    with ExitStack() as stack:
        # torch has public ways into each of these states, but not out of all of them.
        for _ in range(torch._C._len_torch_function_stack()):
            stack.callback(_push_mode, _pop_mode())  # type: ignore[no-untyped-call]
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._is_any_autocast_enabled():
            stack.enter_context(torch._C._DisableAutocast())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        yield


# The garbage collector, paused in steps that make many objects and free none.


@contextmanager
def collector_paused() -> Iterator[None]:
    """Turn off the garbage collector until the block ends; objects made in the block count as old afterwards.

    It is meant for steps that neither read nor write, since garbage of other threads stays in memory until the step
    ends. If several threads are in such a step, the one that turned the collector off turns it on again, perhaps before
    the others are done.

    Examples:
        >>> with collector_paused():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    # The collector scans all objects each time their number has grown by a quarter. A step that makes a few for each of
    # 100,000 tensors, and frees none, would spend as much time in these scans as in its own work.
    was_on = gc.isenabled()
    if was_on:  # otherwise the thread that turned it off turns it on again; simulated ranks end in any order
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            try:
                _mark_as_old()
            finally:
                gc.enable()


_MANY = 10_000
"""Upper bound on new objects that the collector may scan as usual, since this takes no noticeable time."""

_FEW_FROZEN = 1_000
"""Upper bound on objects that Python itself freezes: 3.12 freezes hundreds at its start; programs freeze many more."""

_MOST_UNSEEN = 1_000_000
"""Number of objects marked as old before a full collection, which frees the unreachable cycles among them."""

_unseen = {"objects": 0, "full collections": 0}


def _mark_as_old() -> None:
    """Move new objects to the garbage collector's oldest generation without scanning them, if there are many.

    Pausing the collector only postpones its work: without this call, the next collection would scan all new objects.
    For a load of 20,000 tensors, which takes 0.4 s, that scan would take 0.13 s.
    """
    count, full = gc.get_count()[0], gc.get_stats()[2]["collections"]
    if count <= _MANY or gc.get_freeze_count() > _FEW_FROZEN:  # a program's own frozen objects must stay frozen
        return
    if full != _unseen["full collections"]:
        _unseen.update({"objects": 0, "full collections": full})
    if _unseen["objects"] > _MOST_UNSEEN:
        gc.collect()
        return
    # freeze and unfreeze together move all objects to the oldest generation; Python has no direct call for that.
    _unseen["objects"] += count
    try:
        gc.freeze()
    finally:
        gc.unfreeze()
