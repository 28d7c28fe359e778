"""A Megatron-Core model and its distributed optimizer: what either library saves, the other loads."""

from __future__ import annotations

from typing import Any

from megatron.core import dist_checkpointing

import shardtree as st
from shardtree.interop.megatron import from_megatron

METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


def sharded_state(model: Any, optimizer: Any, *, is_loading: bool = False) -> dict[str, Any]:
    """Return what a rank holds; for a load, the optimizer's states are made first."""
    metadata = dict(METADATA)  # Megatron-Core puts a process group into it
    weights = model.sharded_state_dict(metadata=metadata)
    states = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": states}


def megatron_saves(folder: str, model: Any, optimizer: Any) -> None:
    """Save as Megatron-Core does; the folder must be there."""
    dist_checkpointing.save(sharded_state(model, optimizer), folder, content_metadata=METADATA)


def shardtree_loads(folder: str, model: Any, optimizer: Any) -> None:
    """Load what either saved."""
    target = from_megatron(sharded_state(model, optimizer, is_loading=True))
    put_back(model, optimizer, st.load(target, folder))


def shardtree_saves(folder: str, model: Any, optimizer: Any) -> None:
    """Save so that Megatron-Core loads it."""
    tree = from_megatron(sharded_state(model, optimizer))
    st.save(tree, folder, ("torch_dist", 1), content_metadata=METADATA)


def megatron_loads(folder: str, model: Any, optimizer: Any) -> None:
    """Load what either saved, by Megatron-Core's own code."""
    target = sharded_state(model, optimizer, is_loading=True)
    put_back(model, optimizer, dist_checkpointing.load(target, folder))


def put_back(model: Any, optimizer: Any, loaded: dict[str, Any]) -> None:
    """Give the model and the optimizer what was loaded."""
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
