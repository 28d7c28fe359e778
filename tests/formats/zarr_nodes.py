"""Metadata of zarr arrays as zarr-python writes them, and of the groups around; an array as ranks load it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

import shardtree as st
from shardtree.testing import Layout, assemble, cut, refilled

V2_GROUP = b'{"zarr_format": 2}'
V3_GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def v2_node(shape: Sequence[int], chunk: Sequence[int], dtype: Any, **changes: Any) -> dict[str, Any]:
    """Return what a `.zarray` says, uncompressed unless that is changed."""
    node = {"zarr_format": 2, "shape": [*shape], "chunks": [*chunk], "dtype": dtype, "order": "C", "fill_value": None}
    return node | {"compressor": None, "filters": None} | changes


def v3_node(shape: Sequence[int], chunk: Sequence[int], data_type: Any, **changes: Any) -> dict[str, Any]:
    """Return what a `zarr.json` of an array says."""
    node = {"zarr_format": 3, "node_type": "array", "shape": [*shape], "data_type": data_type, "fill_value": 0}
    return node | regular(chunk) | {"chunk_key_encoding": {"name": "default"}, "codecs": [LITTLE]} | changes


def regular(chunk: Sequence[int]) -> dict[str, Any]:
    """Return the field that says of a version 3 array how it is cut."""
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*chunk]}}}


def encoded(node: dict[str, Any]) -> bytes:
    """Return a node as a file's bytes."""
    return json.dumps(node).encode()


def load_cut(place: Any, key: str, whole: torch.Tensor, layout: Layout, **options: Any) -> torch.Tensor:
    """Return a tensor that ranks loaded in a layout, each its shards."""

    def load(world: st.World) -> Any:
        target = {key: cut(layout, key, torch.zeros_like(whole), world.rank)}
        return target, st.load(target, place, world=world, **options)

    return assemble(refilled(*pair) for pair in st.simulate(layout.ranks, load))[key]
