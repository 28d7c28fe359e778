"""Ray Train's TorchTrainer, shardtree's checkpoints: `python train_ray.py RUN STEPS WORKERS`."""

import sys
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.distributed.checkpoint import state_dict as states

import shardtree as st
from shardtree.interop.dtensor import from_dtensors, to_dtensors


def train(config):
    rank, ranks = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.GELU(), torch.nn.Linear(30, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(7)).chunk(ranks)[rank]

    def held():
        return {
            "model": states.get_model_state_dict(model),
            "optimizer": states.get_optimizer_state_dict(model, optimizer),
        }

    def shards():
        return st.from_local(from_dtensors(held()), st.Mesh(data=ranks), st.P(), rank)

    series, step = st.CheckpointSeries(config["run"], keep=st.retention.keep_last(2)), 0
    if latest := series.latest():
        loaded = to_dtensors(series.load(shards(), latest), like=held())
        states.set_model_state_dict(model, loaded["model"])
        states.set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        step = latest.number
    while step < config["steps"]:
        loss = (model(x) - x[:, :1] * x[:, 1:2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        total = loss.detach() / ranks
        dist.all_reduce(total)
        if step % 4 == 0:
            series.save(shards(), step)
        note(config["run"], f"step {step} loss {float(total)!r}\n" if rank == 0 else "")
        ray.train.report({"step": step, "loss": float(total)})


def note(run, line):
    with Path(run, "losses.txt").open("a") as file:
        file.write(line)


if __name__ == "__main__":
    run, steps, workers = Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3])
    run.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=workers + 1, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"run": str(run), "steps": steps},
        torch_config=TorchConfig("gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="ray", storage_path=str(run), failure_config=FailureConfig(max_failures=1)),
    ).fit()
