"""What the tests of formats with optimizer states share: real folders, what is in them, and loads in other layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import shardtree as st
from shardtree.strategies import LoadOptions
from shardtree.testing import Layout, Piece, cut, first_difference

FIXTURES = Path(__file__).parents[1] / "fixtures"
Tensors = Mapping[str, torch.Tensor]
PREFIXES = {"model": "", "module": "", "fp32": "optimizer.state.param."}


def truth(name: str) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Return the tensors that the program itself had, by the key that they have here, and the optimizer's order."""
    with safe_open(FIXTURES / name / "truth.safetensors", "pt") as file:
        tensors = {_key(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return tensors, json.loads((file.metadata() or {}).get("optimizer_order", "[]"))


def _key(key: str) -> str:
    kind, _, name = key.partition("/")
    return PREFIXES.get(kind, f"optimizer.state.{kind}.") + name


LAYOUTS = ("rows", "columns", "flat")


def shards(key: str, whole: torch.Tensor, layout: str) -> list[st.ShardedTensor]:
    """Return the shards of all ranks of a layout: uneven rows or columns, or flat ranges; of a scalar, all of it."""
    shape, first = tuple(whole.shape), (0,) * whole.ndim
    if not shape:
        pieces = [Piece(0, first, shape)]
    elif layout == "flat":
        pieces = [Piece(0, first, shape, edge) for edge in pairwise(whole.numel() * part // 3 for part in range(4))]
    else:
        axis, parts = (0, 3) if layout == "rows" else (len(shape) - 1, 2)
        edges = [0, *(shape[axis] * (2 * number + 1) // (2 * parts) for number in range(parts - 1)), shape[axis]]
        before, after, rest = first[:axis], first[axis + 1 :], shape[axis + 1 :]
        pieces = [
            Piece(0, (*before, begin, *after), (*shape[:axis], end - begin, *rest)) for begin, end in pairwise(edges)
        ]
    return cut(Layout(1, shape, tuple(pieces)), key, whole, 0)


def wrong_in_layout(folder: Any, expected: Tensors, layout: str, options: LoadOptions | None = None) -> list[str]:
    """Return the keys whose shards aren't what they should be, of a load in a layout."""
    held = {key: shards(key, tensor, layout) for key, tensor in expected.items()}
    target = {"shards": st.without_data(held)}
    loaded = st.load(target, folder, options=options, validate_access_integrity=False)["shards"]
    return [
        key
        for key, parts in held.items()
        if any(first_difference(found, part.data) for part, found in zip(parts, loaded[key], strict=True))
    ]
