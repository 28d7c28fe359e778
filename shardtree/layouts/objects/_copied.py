"""Own copies of values, so that no two places share something that can change."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from ...errors import UnsupportedValue, error_text
from ...trees import leaves_with_paths


def own_copy(value: Any, what: str) -> Any:
    """Return a value that shares nothing that can change with the given one.

    Args:
        value: anything that can be copied; of a view of a tensor, only what it shows is.
        what: what messages call it.

    Raises:
        UnsupportedValue: it can't be copied.

    Examples:
        >>> value = {"seen": [1, 2]}
        >>> copy = own_copy(value, "'loader' at (0,)")
        >>> copy == value, copy["seen"] is value["seen"]
        (True, False)
    """
    try:
        leaves = [leaf for _, leaf in leaves_with_paths(value)]
        # Copied deeply, a view would bring all of its storage along, and a tensor with a gradient's history refuses.
        tensors = {id(leaf): _cloned(leaf) for leaf in leaves if type(leaf) is torch.Tensor}
        return deepcopy(value, tensors)
    except Exception as error:
        # What a value's own __deepcopy__ raises can be anything.
        found, fix = f"{type(error).__name__}: {error}"[:200], "Keep what can be copied: a state, not what holds it."
        raise UnsupportedValue(error_text(f"{what} can't be copied", found=found, fix=fix)) from error


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
