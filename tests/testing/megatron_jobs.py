"""A tensor-parallel job that Megatron-Core's `dist_checkpointing` saves, as its documentation does it, for gloo."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardtree.world import World
from tests.testing import resumed_jobs as jobs
from tests.testing.resumed_jobs import CUT, Job, Kind

KIND = Kind(groups=2, tied=True, parallel="tp")


def make(world: World) -> Job:
    return jobs.make(KIND, world)


def module() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what isn't installed
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import optimizer  # noqa: F401

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None  # it takes for granted that there is a GPU
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    return dist_checkpointing


def sharded(job: Job) -> dict[str, Any]:
    """Return the tree that is saved, or to be loaded: shards of weights and moments, and plain values."""
    megatron, (rank, size) = module(), (job.world.rank, job.world.size)
    weights = {}
    for name, parameter in job.model.named_parameters():
        cuts = [(CUT[name], rank, size)] if name in CUT else []
        replica = 0 if name in CUT else rank
        weights[name] = megatron.ShardedTensor.from_rank_offsets(name, parameter.detach(), *cuts, replica_id=replica)
    states = job.optimizer.state_dict()
    steps = {str(number): state["step"] for number, state in states["state"].items()}
    by_data = {shard.data.data_ptr(): shard for shard in weights.values()}
    numbers = dict(enumerate(by_data[p.data_ptr()] for group in job.optimizer.param_groups for p in group["params"]))
    # Steps have no place in a cut tensor's shard; what is excluded is stored nowhere.
    megatron.optimizer.optim_state_to_sharding_state(states, numbers, exclude_keys=("step",))
    rest = {"seen": job.model.seen, "rope": job.model.rope, "data": job.data.position, "rate": job.rate}
    return {"weights": weights, "optimizer": states, "steps": steps, "noise": job.noise.get_state(), **rest}


def start(job: Job, place: str) -> None:
    """Make the folder, which must be there before a save."""
    if job.world.rank == 0:
        Path(place).mkdir(parents=True)
    job.world.barrier()


def save(job: Job, place: str) -> None:
    start(job, place)
    module().save(sharded(job), place)


def begin(job: Job) -> None:
    """Make the states that a load fills."""
    for group in job.optimizer.param_groups:
        for p in group["params"]:
            zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            job.optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}


def load(job: Job, place: str) -> None:
    begin(job)
    restore(job, module().load(sharded(job), place))


def restore(job: Job, loaded: dict[str, Any]) -> None:
    job.model.load_state_dict({**loaded["weights"], "seen": loaded["seen"]}, strict=False)
    for number, step in loaded["steps"].items():
        loaded["optimizer"]["state"][int(number)]["step"] = step
    job.optimizer.load_state_dict(loaded["optimizer"])
    job.model.rope.copy_(loaded["rope"])
    job.noise.set_state(loaded["noise"])
    job.data.position, job.rate = loaded["data"], loaded["rate"]


# What goes wrong in silence.


def load_without_steps(job: Job, place: str) -> None:
    """Take steps from the optimizer that the load fills, where those that are excluded are still 0."""
    begin(job)
    loaded = module().load(sharded(job), place)
    restore(job, {**loaded, "steps": {number: torch.tensor(0.0) for number in loaded["steps"]}})


@dataclass
class NoisyJob(Job):
    """A job with another generator on each rank, as dropout under tensor parallelism has."""

    own: torch.Generator = field(default_factory=torch.Generator)


def make_with_own_noise(world: World) -> NoisyJob:
    return NoisyJob(**vars(make(world)), own=torch.Generator().manual_seed(100 + world.rank))


def save_own_noise(job: NoisyJob, place: str) -> None:
    """Save each rank's generator as a plain value, of which Megatron-Core stores rank 0's."""
    start(job, place)
    module().save({**sharded(job), "own": job.own.get_state()}, place)


def load_own_noise(job: NoisyJob, place: str) -> None:
    begin(job)
    loaded = module().load({**sharded(job), "own": job.own.get_state()}, place)
    restore(job, loaded)
    job.own.set_state(loaded["own"])


def step_with_own_noise(job: NoisyJob, number: int) -> list[int]:
    torch.rand(2, generator=job.own)
    return jobs.step(job, number)


def save_own_noise_as_objects(job: NoisyJob, place: str) -> None:
    """Save each rank's generator as an object of its own."""
    start(job, place)
    module().save({**sharded(job), "own": own_object(job)}, place)


def load_own_noise_as_objects(job: NoisyJob, place: str) -> None:
    begin(job)
    loaded = module().load({**sharded(job), "own": own_object(job)}, place)
    restore(job, loaded)
    job.own.set_state(loaded["own"])


def own_object(job: NoisyJob) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject("own", job.own.get_state(), (job.world.size,), (job.world.rank,))
