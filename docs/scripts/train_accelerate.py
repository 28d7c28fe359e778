"""Accelerate's loop, shardtree's checkpoints: `torchrun --nproc-per-node=4 train_accelerate.py RUN STEPS`."""

import os
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate_checkpoints import resume, save
from torch.utils.data import DataLoader, TensorDataset

run, last = sys.argv[1], int(sys.argv[2])
loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=7)
accelerator = Accelerator(cpu=True, dataloader_config=loading)
torch.manual_seed(0)
dropout = torch.nn.Dropout(float(os.environ.get("DROPOUT", "0")))
model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.GELU(), dropout, torch.nn.Linear(30, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
x = torch.randn(72, 8, generator=torch.Generator().manual_seed(7))
# A generator of its own, since a loader without one draws from the process's random numbers when it starts.
loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), 12, shuffle=True, generator=torch.Generator())
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
torch.manual_seed(1 + accelerator.process_index)

step = resume(run, model, optimizer, scheduler)
while step < last:
    epoch, done = divmod(step, len(loader))
    loader.set_epoch(epoch)
    for inputs, targets in accelerator.skip_first_batches(loader, done):
        if step == last:
            break
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        accelerator.print(f"step {step} loss {float(accelerator.reduce(loss.detach(), 'mean'))!r}", flush=True)
        if step % 4 == 0:
            save(run, step, model, optimizer, scheduler)
accelerator.end_training()
