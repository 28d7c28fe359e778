"""Recording of threads that traced code starts, and of work that it submits to thread pools.

A mode of torch is active in one thread. So while a trace runs, functions that start threads are replaced in their
modules, and so are a few functions that torch hides from modes. In threads without a trace, the replacements call the
originals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch.utils import dlpack
from torch.utils._python_dispatch import _pop_mode, _push_mode

from ._leftovers import note_module, put_back
from ._memory import SHOWN, Watch

_here = threading.local()
_lock = threading.Lock()
_replaced: list[tuple[Any, str, Any, Any]] = []
_running = 0


@contextmanager
def recorded(watch: Watch) -> Iterator[None]:
    """Record the operations of this thread, and of threads that it starts, until the end of the block."""
    with _replacing(), watch, watch.record, _watched((*_watches(), watch)):
        try:
            yield
        finally:
            watch.record.is_done = True  # for threads that are still running
            put_back(watch.record)


def _watches() -> tuple[Watch, ...]:
    """Return this thread's active modes, one `Watch` for each trace, outermost first: traces may run within traces."""
    watches: tuple[Watch, ...] = getattr(_here, "watches", ())
    return watches


@contextmanager
def _watched(watches: tuple[Watch, ...]) -> Iterator[None]:
    before, _here.watches = _watches(), watches
    try:
        yield
    finally:
        _here.watches = before


def _within(watches: tuple[Watch, ...], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in this thread so that modes (`Watch`) of another thread record it; return its result."""
    new = [watch for watch in watches if watch not in _watches() and not watch.record.is_done]
    with ExitStack() as stack:
        for watch in new:
            stack.enter_context(watch)
            # Entering the mode as a context would set flags that all threads share, and reset them too late.
            _push_mode(watch.record)
            stack.callback(_pop_mode)
        stack.enter_context(_watched((*_watches(), *new)))
        return function(*args, **kwargs)


# Replacements: each of these takes the original function and returns the one that replaces it.


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def start(thread: threading.Thread) -> None:
        if not (watches := _watches()):
            original(thread)
            return
        override = {"run": thread.__dict__["run"]} if "run" in thread.__dict__ else {}
        thread.run = partial(_run, thread, watches, thread.run, override)  # type: ignore[method-assign]
        try:
            original(thread)
        except BaseException:  # the thread was started before, or the system has no more threads
            _put_back(thread, override)
            raise

    return start


def _run(
    thread: threading.Thread, watches: tuple[Watch, ...], run: Callable[[], None], own: dict[str, Callable[[], None]]
) -> None:
    _put_back(thread, own)  # otherwise the thread would refer to itself
    _within(watches, run)


def _put_back(thread: threading.Thread, own: dict[str, Callable[[], None]]) -> None:
    """Restore a thread's own `run` attribute; a thread that had none uses its class's method again."""
    thread.__dict__.pop("run", None)
    thread.__dict__.update(own)


def _submit(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def submit(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not (watches := _watches()):
            return original(pool, function, *args, **kwargs)
        with _watched(()):  # the pool's threads may outlive the trace, so the work is recorded, not the threads
            return original(pool, partial(_within, watches, function), *args, **kwargs)

    return submit


def _add_done_callback(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def add_done_callback(future: Future[Any], function: Callable[..., Any]) -> None:
        watches = _watches()
        original(future, partial(_within, watches, function) if watches else function)

    return add_done_callback


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def noting(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for watch in _watches():
            note_module(watch.record, module)
        return original(module, *args, **kwargs)

    return noting


def _shown(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def shown(*args: Any, **kwargs: Any) -> Any:
        watches = _watches()
        return watches[-1].show(name, original, args, kwargs) if watches else original(*args, **kwargs)

    return shown


_CHANGES = (
    *("__init__", "__setattr__", "__delattr__", "register_buffer", "register_parameter", "add_module", "_apply"),
    *("register_forward_hook", "register_forward_pre_hook", "_register_state_dict_hook"),
    *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
)
"""Methods that change a module's attributes, parameters, submodules or hooks."""
_REPLACEMENTS: tuple[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
    (threading.Thread, "start", _start),
    (ThreadPoolExecutor, "submit", _submit),
    (Future, "add_done_callback", _add_done_callback),
    *((torch.nn.Module, name, _noting) for name in _CHANGES),
    *((torch, name, partial(_shown, name)) for name in SHOWN),
    *((dlpack, name, partial(_shown, name)) for name in ("from_dlpack", "to_dlpack")),
)


@contextmanager
def _replacing() -> Iterator[None]:
    """Replace functions of other modules, until the last of several concurrent traces has ended."""
    global _running
    with _lock:
        _running += 1
        if _running == 1:
            for owner, name, replacement in _REPLACEMENTS:
                original = getattr(owner, name)
                new = replacement(original)
                _replaced.append((owner, name, original, new))
                setattr(owner, name, new)
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            while not _running and _replaced:
                owner, name, original, new = _replaced.pop()
                # If somebody else has replaced ours meanwhile, theirs stays: ours then calls the original.
                if getattr(owner, name) is new:
                    setattr(owner, name, original)
