"""The trace of a recorded run, collected from its output tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.lazy import dense
from ..core.mapping import without_shape
from ..errors import TraceError, error_text
from ._arguments import is_ordinary
from ._cells import Cells, Tracer
from ._moves import Moves, in_place, read_of, rolled
from ._steps import Kind, seen_through
from ._trace import Trace


def collected(record: Cells, kinds: Mapping[str, Kind], tensors: Mapping[str, torch.Tensor], *, fills: bool) -> Trace:
    """Return the trace of a run.

    Args:
        record: Record of the run.
        kinds: Shapes and dtypes of the sources, by name.
        tensors: Outputs by name.
        fills: Whether the outputs are destinations, whose elements count only where the code wrote them.
    """
    outputs, moves, tied, losses = {}, {}, {}, {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        outputs[name] = Kind(tuple(tensor.shape), tensor.dtype)
        cell = record.find_cell(tensor) if fills else record.cell(tensor)
        if cell is None:
            moves[name] = Moves()
            continue
        view, steps = tensor.meta if isinstance(tensor, Tracer) else tensor, dense(outputs[name].shape).stride
        memory = id(cell) if cell.keep is None else cell.keep._cdata
        place = (memory, view.storage_offset(), view.shape, view.stride(), view.dtype, seen_through(view))
        if tensor.numel() and (main := first.setdefault(place, name)) != name:
            tied[name] = main
        reads = record.reads(tensor, steps)
        moves[name] = Moves(rolled([move for move in reads if not fills or move.root is not cell.before]))
        if cell.overwritten:
            # Places that were overwritten several times have several moves: the first that meets the read counts.
            there = read_of(int(view.storage_offset()), view.shape, steps, view.stride())
            losses[name] = Moves(map(in_place, Moves(cell.overwritten).find([there])[0]))
    return Trace(kinds, outputs, moves, tied, {name: lost for name, lost in losses.items() if len(lost)})


def checked_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """Return the code's outputs, after checking that they are tensors by name."""
    if not isinstance(outputs, Mapping):
        wrong: list[str] = [type(outputs).__name__]
    else:
        wrong = [f"{name!r}: {type(value).__name__}" for name, value in outputs.items() if not _is_tensor(value)]
    if wrong:
        fix = "Return a dict of tensors, or pass into=model.state_dict for a loader that fills a model."
        raise TraceError(error_text("trace: the outputs are not a dict of tensors", offenders=wrong, fix=fix))
    return dict(outputs)


def _is_tensor(value: Any) -> bool:
    if isinstance(value, Tracer):
        return True
    return isinstance(value, torch.Tensor) and is_ordinary(value) and not without_shape(value)
