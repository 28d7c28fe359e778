"""Lightning's Trainer, shardtree's checkpoints: `torchrun --nproc-per-node=4 train_lightning.py RUN STEPS`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from shardtree.interop.lightning import ShardtreeStrategy

run, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])


class Model(LightningModule):
    """Two layers, sharded over all processes."""

    def configure_model(self):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.GELU(), torch.nn.Linear(30, 1))
        for module in (self.net[0], self.net[2], self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {self.global_step + 1} loss {float(total)!r}", flush=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


x = torch.randn(12, 8, generator=torch.Generator().manual_seed(7))
batches = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), 12 // ranks)  # an epoch is a step
trainer = Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy=ShardtreeStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
    max_epochs=int(sys.argv[2]),
    callbacks=[ModelCheckpoint(run, "step_{step:08d}", every_n_epochs=4, save_top_k=-1, auto_insert_metric_name=False)],
    logger=False,
    enable_progress_bar=False,
)
finished = sorted(path.parent for path in run.glob("step_*/metadata.json"))
trainer.fit(Model(), batches, ckpt_path=finished[-1] if finished else None)
dist.destroy_process_group()
