"""torchtitan's parts, shardtree's checkpoints: `torchrun --nproc-per-node=4 train_titan_plug.py RUN STEPS`."""

import sys

import torch.distributed as dist
from job import batches, build, train_step
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from shardtree.interop.torchtitan import CheckpointManager

ADAM = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
OPTIMIZER = OptimizersContainer.Config(param_groups=[ADAM], implementation="for-loop")
CHECKPOINT = CheckpointManager.Config(enable=True, folder=sys.argv[1], interval=4, async_mode="async")


class Trainer(Stateful):
    """What torchtitan's own trainer does with its checkpoint manager, on CPUs."""

    def __init__(self):
        self.step, (self.model, *_) = 0, build()
        self.optimizers = OPTIMIZER.build(model_parts=[self.model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=2)
        self.lr_schedulers = schedulers.build(optimizers=self.optimizers, training_steps=10_000)
        self.checkpointer = CHECKPOINT.build(
            dataloader=None,  # the job's batches go by the step
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
        )

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"]

    def train(self, steps):
        self.checkpointer.load()
        for step, batch in batches(self.step + 1, steps):
            self.step = step
            loss = train_step(self.model, self.optimizers, self.lr_schedulers, batch)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss!r}", flush=True)
            self.checkpointer.save(step, last_step=step == steps)
        self.checkpointer.close()


dist.init_process_group("gloo")
Trainer().train(int(sys.argv[2]))
dist.destroy_process_group()
