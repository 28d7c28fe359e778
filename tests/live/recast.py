"""States of which some tensors are wanted in other dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from hypothesis import strategies as st

from shardtree.core.plans import convert, convertible
from shardtree.errors import ShapeError
from shardtree.testing import STORABLE_DTYPES, GlobalState, global_states
from shardtree.testing._bits import carried


def without_nans(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with zeros for NaNs: which NaN one becomes, torch says otherwise for few elements than for many.

    Packed dtypes, which have no conversions, stay as they are.
    """
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    if not convertible(tensor.dtype, wide):
        return tensor
    return carried(tensor).masked_fill(tensor.to(wide).isnan(), 0).view(tensor.dtype)


def fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    try:
        convert("w", tensor, torch.empty(tensor.shape, dtype=dtype))
    except ShapeError:
        return False
    return True


@st.composite
def recast_states(draw: st.DrawFn) -> tuple[GlobalState, GlobalState]:
    """Return a state, and the same as it is wanted: some of its tensors converted to other dtypes, as torch does."""
    state = draw(global_states())
    before, after = {}, {}
    for key, tensor in state.tensors.items():
        dtype = tensor.dtype if draw(st.booleans()) else draw(st.sampled_from(_dtypes(tensor)))
        before[key] = tensor if dtype == tensor.dtype else without_nans(tensor)
        after[key] = before[key].to(dtype)
    return with_tensors(state, before), with_tensors(state, after)


def with_tensors(state: GlobalState, tensors: Mapping[str, torch.Tensor]) -> GlobalState:
    return replace(state, tensors=tensors)


def _dtypes(tensor: torch.Tensor) -> list[torch.dtype]:
    found = [dtype for dtype in STORABLE_DTYPES if convertible(tensor.dtype, dtype) and dtype != tensor.dtype]
    return [dtype for dtype in found if fits(tensor, dtype)] or [tensor.dtype]
