"""ZeRO-1 by hand: weights in one buffer of buckets, each data-parallel rank steps AdamW on its part, all gather."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardtree.buffers import plan_buffers
from tests.training.place import Place, summed
from tests.training.transformer import Config, Transformer, fill_model

ALIGNED = 8  # elements: where a parameter begins
BUCKET_ALIGNED = 16  # elements: where a bucket ends
BUCKET = 2000  # elements: a bucket this long takes no more parameters
SEED = 5
BATCH = 8
DECAY, NO_DECAY = {"lr": 0.015, "weight_decay": 0.1}, {"lr": 0.005, "weight_decay": 0.0}
SHRINK = 0.93  # each step's learning rate, times the one before


class Trainer:
    """A model, its optimizer and its data, on one rank.

    Attributes:
        plan: where parameters lie in `weights` and `gradients`, the last ones first, as their gradients come first.
        parts: this rank's part of each bucket, in float32.
        masters: what this rank steps of each parameter, in `parts`, by name: the optimizer's parameters.
    """

    def __init__(self, config: Config, place: Place) -> None:
        self.place = place
        self.model = Transformer(config, place)
        self.parameters = dict(self.model.named_parameters())
        self.plan = plan_buffers(
            self.parameters,
            data_parallel=place.layout.dp,
            bucket_size=BUCKET,
            align=ALIGNED,
            bucket_align=BUCKET_ALIGNED,
            order=reversed(self.parameters),
        )
        length = self.plan.buckets[-1][1]
        self.weights, self.gradients = torch.zeros(length, dtype=config.dtype), torch.zeros(length)
        for name, parameter in self.parameters.items():
            parameter.data = self._of(self.weights, name).view(parameter.shape)
        self.parts = [torch.zeros(length) for length in self.plan.slice_lengths]
        self.masters = {
            part.name: nn.Parameter(self.parts[part.bucket][part.taken]) for part in self.plan.ranges(place.dp_rank)
        }
        self.optimizer = torch.optim.AdamW(self._groups(), foreach=False)
        self.draw = torch.Generator().manual_seed(SEED)
        self.step = 0

    def start(self, weights: dict[str, torch.Tensor]) -> None:
        """Take whole weights."""
        fill_model(self.model, weights)
        for part in self.plan.ranges(self.place.dp_rank):
            self.masters[part.name].data.copy_(self._of(self.weights, part.name)[part.flattened_range])

    def train(self, steps: int) -> list[float]:
        """Return the mean loss of each of some steps, over the whole batch."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        config, dp = self.model.config, self.place.layout.dp
        # Every rank draws the whole batch and takes its rows, so the batch is the same whatever the layout.
        tokens = drawn_tokens(config, self.draw)
        loss = self.model(tokens.chunk(dp)[self.place.dp_rank]) / (BATCH * (config.time - 1))
        for parameter in self.parameters.values():
            parameter.grad = None
        loss.backward()
        self.gradients.zero_()
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            self._of(self.gradients, name).copy_(parameter.grad.flatten())
        self.gradients = summed(self.gradients, self.place.dp_group)
        for part in self.plan.ranges(self.place.dp_rank):
            self.masters[part.name].grad = self._of(self.gradients, part.name)[part.flattened_range]
        self.optimizer.step()
        shrink(self.optimizer)
        self._gather()
        self.step += 1
        return float(summed(loss.detach(), self.place.dp_group))

    def _gather(self) -> None:
        """Put what this rank stepped into the buffer, and what the others did."""
        for bucket, (first, last) in enumerate(self.plan.buckets):
            whole, own = self.weights[first:last], self.parts[bucket].to(self.weights.dtype)
            if self.place.dp_group is None:
                whole.copy_(own)
            else:
                dist.all_gather(list(whole.chunk(self.place.layout.dp)), own, group=self.place.dp_group)

    def _of(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        (place,) = (each for each in self.plan.places if each.name == name)
        return buffer[place.start : place.stop]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups: matrices decay, vectors don't."""
        decay = [master for name, master in self.masters.items() if self.parameters[name].ndim > 1]
        plain = [master for name, master in self.masters.items() if self.parameters[name].ndim == 1]
        return [{"params": decay, **DECAY}, {"params": plain, **NO_DECAY}]


def drawn_tokens(config: Config, draw: torch.Generator) -> torch.Tensor:
    """Return a batch of tokens, shape (rows, time). They follow a rule that can be learned."""
    tokens = torch.randint(config.vocabulary, (BATCH, config.time), generator=draw)
    for time in range(1, config.time):
        tokens[:, time] = (tokens[:, time - 1] * 3 + 1) % config.vocabulary
    return tokens


def shrink(optimizer: torch.optim.Optimizer) -> None:
    """Change the learning rates, as a schedule does that keeps no state of its own."""
    for group in optimizer.param_groups:
        group["lr"] *= SHRINK
