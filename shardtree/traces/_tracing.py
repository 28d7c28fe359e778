"""Traces of code: it runs once on tensors without data, recorded in all threads that it uses."""

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
    """Run loading code once on tensors without data, and return what it does to their elements.

    The code may take views of tensors, join, copy, cast and gather them by known indices, and compute each element from
    those at its place. Whatever asks for what the elements are is refused. Tensors of its own that it writes to aren't
    changed, and what it changes in modules is put back at the end. Whatever else it keeps of the tensors refuses every
    later operation. Threads that it starts are recorded too; `docs/trace.md` lists what can't be seen. Functions that
    start threads, assign attributes of modules or pass memory are replaced while it runs; in other threads they do as
    before. Other threads must leave the modules alone meanwhile.

    Args:
        function: takes a dict of tensors by name, and returns tensors by name; or it fills what `into` names, as a
            model's own loader does: ``lambda tensors: model.load_weights(tensors.items())``.
        sources: anything with a shape and a dtype, by name: an open checkpoint, shards, tensors.
        into: is called afterwards for the destinations, as ``model.state_dict``. What they held before counts as
            never written.
        may_catch: names of operations, as "max", whose refusal the code may catch and do something else instead; of
            any other, that would be taken for what it does.

    Raises:
        TraceError: the code asks for elements; names the operation, the source and the caller's line. Or it caught that
            error; or tensors were changed unseen.

    Examples:
        >>> import shardtree as st
        >>> def load(tensors):
        ...     q, k, v = tensors["qkv"].chunk(3)
        ...     return {"q": q, "kv": torch.stack([k, v])}
        >>> found = st.trace(load, {"qkv": torch.empty(6, 4)})
        >>> print(found)
        trace: 1 source -> 2 outputs
          q: float32[2,4] =
            [a, b] = qkv[0:+a, b]  (a=2 b=4)
          kv: float32[2,2,4] =
            [a, b, c] = qkv[2:+(a b), c]  (a=2 b=2 c=4)
        >>> found.inverse()(found({"qkv": torch.arange(24.0).view(6, 4)}))["qkv"][1]
        tensor([4., 5., 6., 7.])

    References:
        `jax.make_jaxpr`, for the form.
    """
    record = RecordingMode()
    # An open checkpoint's metadata: its values would be made, and its objects read.
    entries = getattr(sources, "metadata", sources)
    kinds = {name: kind_of(each) for name, each in entries.items() if hasattr(each, "dtype")}
    tracers = {name: record.source(name, kind) for name, kind in kinds.items()}
    for module in (*modules_of(function), *modules_of(into)):
        note_module(record, module)
    with recorded(Watch(record)):
        try:
            result = function(dict(tracers))
            tensors = into() if into is not None else result
        except Exception as error:
            if not isinstance(error, TraceError):
                record.refusals.check_raised(error, may_catch)
            raise
        record.refusals.check_caught(may_catch)
        outputs = checked_outputs(tensors)
        with record.lock, torch._C.DisableTorchFunction():
            found = collected(record, kinds, outputs, fills=into is not None)
            record.check_unchanged()  # before models get back what they held, which are changes, too
    return found
