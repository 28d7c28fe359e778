"""A shield against the state of torch that surrounds a call: what we compute doesn't depend on it."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

P = typing.ParamSpec("P")
T = typing.TypeVar("T")


def shielded(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs outside of torch's modes of the caller's thread.

    These are the default device (a function mode too), other function modes, dispatch modes such as `FakeTensorMode`,
    autocast and inference mode. So new tensors are ordinary ones with elements, on the device that we say, and
    arithmetic is done in its operands' dtype. Given tensors keep their nature: an inference tensor that is filled
    stays one. What isn't a thread's (the default dtype, deterministic algorithms) we can't leave for a while: each
    allocation says its dtype.

    Examples:
        >>> with torch.device("meta"), torch.inference_mode():
        ...     made = shielded(torch.zeros)(2)
        >>> made, made.is_inference()
        (tensor([0., 0.]), False)
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _is_swayed():
            return function(*args, **kwargs)
        with _without_modes():
            return function(*args, **kwargs)

    return call


def _is_swayed() -> bool:
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return bool(modes) or torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled()


@contextmanager
def _without_modes() -> Iterator[None]:
    with ExitStack() as stack:
        # torch has public ways into these states, but none out of all of them.
        for _ in range(torch._C._len_torch_function_stack()):
            stack.callback(_push_mode, _pop_mode())  # type: ignore[no-untyped-call]
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._is_any_autocast_enabled():
            stack.enter_context(torch._C._DisableAutocast())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        yield
