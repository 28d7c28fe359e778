"""A Megatron-Core model and its optimizer: what either library saves, the other loads."""

from megatron.core import dist_checkpointing

import shardtree as st
from shardtree.interop.megatron import from_megatron

METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


def sharded_state(model, optimizer, is_loading=False):
    metadata = dict(METADATA)  # Megatron-Core puts a process group into it
    weights = model.sharded_state_dict(metadata=metadata)
    states = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": states}


def put_back(model, optimizer, loaded):
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def megatron_saves(folder, model, optimizer):
    dist_checkpointing.save(sharded_state(model, optimizer), folder, content_metadata=METADATA)


def shardtree_loads(folder, model, optimizer):
    target = from_megatron(sharded_state(model, optimizer, is_loading=True))
    put_back(model, optimizer, st.load(target, folder))


def shardtree_saves(folder, model, optimizer):
    tree = from_megatron(sharded_state(model, optimizer))
    st.save(tree, folder, ("torch_dist", 1), content_metadata=METADATA)


def megatron_loads(folder, model, optimizer):
    target = sharded_state(model, optimizer, is_loading=True)
    put_back(model, optimizer, dist_checkpointing.load(target, folder))
