"""Detection of the stored tensors that a lazy tensor casts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..core.lazy import Concatenated, LazyTensor, Stored


def cast_sources(lazy: Any) -> Iterator[tuple[str, torch.dtype]]:
    """Yield the name and dtype of each stored tensor that a lazy tensor casts to another dtype.

    Views and concatenations of stored tensors count; inputs of arithmetic or of functions don't.

    Examples:
        >>> from shardtree.core.lazy import stored
        >>> weight = stored(lambda at, shape: torch.ones(shape), (2, 3), torch.float32, name="w")
        >>> [*cast_sources(torch.cat([weight, weight]).T.to(torch.bfloat16))]
        [('w', torch.float32), ('w', torch.float32)]
        >>> [*cast_sources((2 * weight).half())], [*cast_sources(weight.T)]
        ([], [])
    """
    return (pair for pair in _moved(lazy) if pair[1] != lazy.dtype)


def _moved(source: Any) -> Iterator[tuple[str, torch.dtype]]:
    if isinstance(source, LazyTensor):
        yield from _moved(source.source)
    elif isinstance(source, Concatenated):
        for part in source.parts:
            yield from _moved(part)
    elif isinstance(source, Stored):
        yield source.name, source.dtype
