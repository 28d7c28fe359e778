"""A trainer with ZeRO-1 of its own, saved and resumed on any ranks: a gated layer, AdamW in two groups, a schedule."""

import torch

import shardtree as st

MASTERS = "optimizer.state.fp32_param"


class Gated(torch.nn.Module):
    """The model."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(6)
        self.fc1 = torch.nn.Linear(6, 20, bias=False)  # gate rows, then up rows
        self.fc2 = torch.nn.Linear(10, 1, bias=False)
        draw = torch.Generator().manual_seed(0)
        for layer in (self.fc1, self.fc2):
            torch.nn.init.normal_(layer.weight, std=0.3, generator=draw)

    def forward(self, x):
        gate, up = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(torch.nn.functional.silu(gate) * up)


class Trainer:
    """Each data-parallel rank steps fp32 copies of its part of the parameters, and all ranks gather the result."""

    def __init__(self, world):
        torch.set_num_threads(1)  # on this rank, maybe a thread: matrix products that add in the same order each time
        self.world, self.model, self.step = world, Gated(), 0
        self.params = dict(self.model.named_parameters())
        self.plan = st.buffers.plan_buffers(self.params, data_parallel=world.size, align=8)
        self.slices = [torch.zeros(length) for length in self.plan.slice_lengths]
        self.masters = st.buffers.slice_views(self.plan, world.rank, self.slices)
        for part in self.plan.ranges(world.rank):
            self.masters[part.name].copy_(self.params[part.name].detach().flatten()[part.flattened_range])
        matrices = [master for name, master in self.masters.items() if self.params[name].ndim == 2]
        vectors = [master for name, master in self.masters.items() if self.params[name].ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.003}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.03)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.98)

    def train(self, steps):
        return [self.train_step() for _ in range(steps)]

    def train_step(self):
        batch = torch.randn(24, 6, generator=torch.Generator().manual_seed(self.step))  # the same on any ranks
        mine = batch.chunk(self.world.size)[self.world.rank]
        loss = (self.model(mine)[:, 0] - mine[:, 0] * mine[:, 1]).square().sum() / len(batch)
        self.model.zero_grad()
        loss.backward()
        gradients = {name: sum(self.world.all_gather(param.grad)) for name, param in self.params.items()}
        for part in self.plan.ranges(self.world.rank):
            self.masters[part.name].grad = gradients[part.name].flatten()[part.flattened_range]
        self.optimizer.step()
        self.schedule.step()
        for rank, slices in enumerate(self.world.all_gather(self.slices)):
            views = st.buffers.slice_views(self.plan, rank, slices)
            for part in self.plan.ranges(rank):
                self.params[part.name].data.view(-1)[part.flattened_range] = views[part.name]
        self.step += 1
        return float(sum(self.world.all_gather(loss.detach())))


def sharded_model(trainer):
    """The layout: all that differs for another model."""
    replica = (0, 0, trainer.world.rank)  # pipeline, tensor and data parallel
    shards = {
        name: st.ShardedTensor.from_rank_offsets(name, param.detach(), replica_id=replica)
        for name, param in trainer.params.items()
    }
    gate_and_up = st.lenses.gate_and_up(tensor_parallel=1, part="fc1", names=("gate", "up"))
    return st.lenses.factories_by_pattern(shards, {"fc1.weight": gate_and_up})


def by_id(trainer, pieces):
    """The optimizer's parameters are pieces of the model's, which torch's state dict numbers."""
    names = st.optim.get_param_id_to_name_map(trainer.masters, trainer.optimizer)
    return {number: pieces[name] for number, name in names.items()}


def tree_of(trainer):
    plan, rank, model = trainer.plan, trainer.world.rank, sharded_model(trainer)
    pieces = st.buffers.flat_shards(plan, rank, trainer.slices, model)
    return {
        "model": model,
        "masters": st.buffers.flat_shards(plan, rank, trainer.slices, model, prefix=MASTERS),
        "optimizer": st.optim.optim_state_to_sharding_state(trainer.optimizer.state_dict(), by_id(trainer, pieces)),
        "schedule": trainer.schedule.state_dict(),
        "step": trainer.step,
    }


def save(trainer, checkpoint):
    st.save(tree_of(trainer), checkpoint, world=trainer.world)


def resume(trainer, checkpoint):
    """Nothing of the trainer changes before everything is loaded; where one rank's load fails, it fails on all."""
    plan, rank, model = trainer.plan, trainer.world.rank, sharded_model(trainer)
    pieces = by_id(trainer, st.buffers.flat_targets(plan, rank, model))
    fresh, stored = trainer.optimizer.state_dict(), st.load_sharded_metadata(checkpoint)
    target = {
        "model": model,
        "masters": st.buffers.flat_targets(plan, rank, model, prefix=MASTERS),
        "optimizer": st.optim.abstract_optim_state_from_metadata(fresh, pieces, stored, exclude_keys="fp32_param"),
    }
    loaded = st.load(target, checkpoint, world=trainer.world)
    trainer.model.load_state_dict(loaded["model"])
    masters = st.buffers.buffer_slices(plan, rank, loaded["masters"])
    for part, found in zip(trainer.slices, masters, strict=True):
        part.copy_(found)
    trainer.optimizer.load_state_dict(st.optim.sharding_state_to_optim_state(loaded["optimizer"]))
    trainer.schedule.load_state_dict(loaded["schedule"])
    trainer.step = loaded["step"]
