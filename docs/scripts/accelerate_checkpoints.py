"""What a loop of Accelerate's holds, saved by shardtree and resumed, on any number of processes."""

import random

import numpy as np
import torch
from accelerate import PartialState
from torch.distributed.checkpoint import state_dict as states

import shardtree as st
from shardtree.interop.dtensor import from_dtensors, to_dtensors


def save(run, step, model, optimizer, scheduler):
    """Save a step, on all processes together; the newest two stay."""
    values = {"scheduler": scheduler.state_dict(), "random": random_numbers()}
    steps(run).save(shards(tensors(model, optimizer)) | values, step)


def resume(run, model, optimizer, scheduler):
    """Load the newest step in place, and return its number, 0 if there is none."""
    latest = steps(run).latest()
    if latest is None:
        return 0
    loaded = load(run, latest.number, model, optimizer)
    scheduler.load_state_dict(loaded["scheduler"])
    set_random_numbers(loaded["random"])
    return latest.number


def steps(run):
    return st.CheckpointSeries(run, keep=st.retention.keep_last(2))


def load(run, step, model, optimizer):
    """Load a model and its optimizer in place, and return everything else."""
    held = tensors(model, optimizer)
    by_rule = st.LoadOptions(object_rules={"random": st.objects.drop_objects})  # on another number of processes
    stored = steps(run).load(shards(held) | {"random": random_numbers()}, step, donate=True, options=by_rule)
    loaded = to_dtensors(stored, like=held)
    states.set_model_state_dict(model, loaded.pop("model"))
    states.set_optimizer_state_dict(model, optimizer.optimizer, loaded.pop("optimizer"))
    return loaded


def tensors(model, optimizer):
    optimizer = optimizer.optimizer  # Accelerate's wrapper leaves steps out while gradients accumulate
    return {
        "model": states.get_model_state_dict(model),
        "optimizer": states.get_optimizer_state_dict(model, optimizer),
    }


def shards(tree):
    """Return this process's shards: FSDP2's, and replicas of what all processes hold."""
    here = PartialState()
    return st.from_local(from_dtensors(tree), st.Mesh(data=here.num_processes), st.P(), here.process_index)


def random_numbers():
    """Return the states of this process's random numbers, as one cell of an array of objects."""
    here = PartialState()
    own = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    return st.ShardedObject("random", own, (here.num_processes,), (here.process_index,))


def set_random_numbers(own):
    random.setstate(own["python"])
    np.random.set_state(own["numpy"])
    torch.set_rng_state(own["cpu"])
    if "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"])
