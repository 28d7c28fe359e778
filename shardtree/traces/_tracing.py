"""Tracing: code runs once on tensors without data, and its operations on them are recorded in all of its threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..errors import TraceError
from ._leftovers import modules_of, note_module
from ._memory import Watch
from ._outputs import checked_outputs, collected
from ._recording import RecordingMode
from ._steps import kind_of
from ._threads import recorded
from ._trace import Trace


def trace(
    function: Callable[[dict[str, Any]], Any],
    sources: Mapping[str, Any],
    *,
    into: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    may_catch: Collection[str] = (),
) -> Trace:
    """Run loading code once on tensors without data, and return the trace of what it does to their elements.

    The code may view, join, copy and cast tensors, gather their elements by known indices, and compute each element
    from elements at the same position. Operations that depend on the values of elements are refused. Existing tensors,
    such as parameters, keep their values, and modules get their attributes back at the end. A traced tensor that the
    code has stored for later, for example in a list, refuses all operations after the trace.

    Threads that the code starts are recorded, too; `docs/trace.md` lists what can't be seen. During the trace, some
    functions of torch and of Python's thread classes are replaced; in other threads they behave as before. Other
    threads must leave the modules alone until the trace ends.

    Args:
        function: Function that takes a dict of tensors by name. It returns tensors by name; or it fills the tensors
            that `into` returns, as a model's own loader does: ``lambda tensors: model.load_weights(tensors.items())``.
        sources: Objects with a shape and a dtype, by name: an open checkpoint, shards, tensors, or safetensors slices.
            Other objects are left out.
        into: Function that returns the destinations, such as ``model.state_dict``; it is called after `function`. The
            destinations' previous elements count as never written.
        may_catch: Names of operations, such as "max", whose refusal the code may catch to use a fallback. Any other
            caught refusal is an error, since the trace would contain a fallback by accident.

    Raises:
        TraceError: the code needs values of elements (the error names the operation, the sources and the caller's
            line), it caught such an error, or tensors were changed by operations that weren't recorded.

    Examples:
        >>> import shardtree as st
        >>> def load(tensors):
        ...     q, k, v = tensors["qkv"].chunk(3)
        ...     return {"q": q, "kv": torch.stack([k, v])}
        >>> traced = st.trace(load, {"qkv": torch.empty(6, 4)})
        >>> print(traced)
        trace: 1 source -> 2 outputs
          q: float32[2,4] =
            [a, b] = qkv[0:+a, b]  (a=2 b=4)
          kv: float32[2,2,4] =
            [a, b, c] = qkv[2:+(a b), c]  (a=2 b=2 c=4)
        >>> traced.inverse()(traced({"qkv": torch.arange(24.0).view(6, 4)}))["qkv"][1]
        tensor([4., 5., 6., 7.])

    References:
        `jax.make_jaxpr`, which traces functions in the same way.
    """
    record = RecordingMode()
    # Only the metadata of an open checkpoint are used: its values would be built, and its objects read.
    entries = getattr(sources, "metadata", sources)
    tensors = {name: entry for name, entry in entries.items() if hasattr(entry, "dtype") or hasattr(entry, "get_dtype")}
    kinds = {name: kind_of(tensor) for name, tensor in tensors.items()}
    tracers = {name: record.source(name, kind) for name, kind in kinds.items()}
    for module in (*modules_of(function), *modules_of(into)):
        note_module(record, module)
    with recorded(Watch(record)):
        try:
            result = function(dict(tracers))
            outputs = into() if into is not None else result
        except Exception as error:
            if not isinstance(error, TraceError):
                record.refusals.check_raised(error, may_catch)
            raise
        record.refusals.check_caught(may_catch)
        outputs = checked_outputs(outputs)
        with record.lock, torch._C.DisableTorchFunction():
            traced = collected(record, kinds, outputs, fills=into is not None)
            record.check_unchanged()  # before models are restored, which would count as changes
    return traced
