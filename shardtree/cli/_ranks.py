"""What each of the demo's processes does: save its shards, or load others and compare them with what they should be."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import load, save
from ..storage import ReadReport
from ..strategies import LoadOptions, SaveOptions
from ..world import World
from ._encoder import Weights, embed
from ._layout import BY_HIDDEN, BY_UNITS
from ._state import Comparison, compare, held_bytes, meta, training_state
from ._weights import Source, weights_of

Counts = MutableSequence[int]
"""Bytes that each rank wrote or read so far, by rank, in memory that processes share; -1 before it starts."""

# Token ids of the pretrained encoder's vocabulary, so that no tokenizer is needed.
SENTENCES = {
    "A checkpoint is a value.": (101, 1037, 26520, 2003, 1037, 3643, 1012, 102),
    "The saved state never changes.": (101, 1996, 5552, 2110, 2196, 3431, 1012, 102),
    "A cat sleeps on the warm stove.": (101, 1037, 4937, 25126, 2006, 1996, 4010, 16247, 1012, 102),
}


@dataclass(frozen=True, slots=True)
class Saved:
    """What one rank saved.

    Attributes:
        held: bytes of its tensors.
        written: bytes that it wrote of them, and of its file's header.
        began: seconds on the machine's monotonic clock.
        ended: likewise.
    """

    held: int
    written: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank loaded.

    Attributes:
        held: bytes of its tensors.
        read: what `load` reported.
        began: seconds on the machine's monotonic clock.
        ended: likewise.
        comparison: with what it should be.
    """

    held: int
    read: ReadReport
    began: float
    ended: float
    comparison: Comparison


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """A vector for each sentence, by the original weights and by the reloaded ones, float32 (sentences, hidden)."""

    original: Tensor
    reloaded: Tensor

    @property
    def are_equal(self) -> bool:
        """Whether they are the same bit for bit."""
        return torch.equal(self.original.view(torch.int32), self.reloaded.view(torch.int32))


def save_rank(world: World, source: Source, folder: str, counts: Counts) -> Saved:
    """Save one rank's shards."""
    torch.set_num_threads(1)
    weights = weights_of(source)
    state = training_state(weights, BY_UNITS, world.rank, world.size, head_size=source.shape.head_size)
    _start(world, counts)
    began = time.monotonic()
    save(state, folder, world=world, options=SaveOptions(progress=_counter(world, counts)))
    return Saved(held_bytes(state), counts[world.rank], began, time.monotonic())


def load_rank(world: World, source: Source, folder: str, counts: Counts) -> tuple[Loaded, Embeddings | None]:
    """Load one rank's shards of the other layout, check them, and on rank 0 run the encoder with them."""
    torch.set_num_threads(1)
    weights, reports = weights_of(source), list[ReadReport]()
    cut = (BY_HIDDEN, world.rank, world.size)
    target = training_state(meta(weights), *cut, head_size=source.shape.head_size)
    _start(world, counts)
    began = time.monotonic()
    tree = load(
        target, folder, world=world, options=LoadOptions(progress=_counter(world, counts), report=reports.append)
    )
    ended = time.monotonic()
    expected = training_state(weights, *cut, head_size=source.shape.head_size)
    loaded = Loaded(held_bytes(target), reports[0], began, ended, compare(tree, expected))
    return loaded, _embeddings(world, weights, tree["model"], target["model"], source)


def _start(world: World, counts: Counts) -> None:
    counts[world.rank] = 0
    world.barrier()


def _counter(world: World, counts: Counts) -> Callable[[int], None]:
    def count(size: int) -> None:
        counts[world.rank] += size

    return count


def _embeddings(
    world: World, original: Weights, loaded: Weights, target: dict[str, Any], source: Source
) -> Embeddings | None:
    """Return, on rank 0, what the encoder makes of the sentences with either weights."""
    reloaded = _put_together(world, loaded, target)
    if reloaded is None:
        return None
    ids = [[token % source.shape.vocabulary for token in tokens] for tokens in SENTENCES.values()]
    # Copies, so that both lie alike in memory: matrix products may differ in the last bit where alignment does.
    copies = {name: whole.clone() for name, whole in original.items()}
    heads = source.shape.heads
    return Embeddings(embed(copies, ids, heads=heads), embed(reloaded, ids, heads=heads))


def _put_together(world: World, loaded: Weights, target: dict[str, Any]) -> dict[str, Tensor] | None:
    """Return, on rank 0, whole tensors made of all ranks' loaded pieces."""
    pieces = {name: (target[name].global_slice(), tensor) for name, tensor in loaded.items()}
    if world.rank != 0:
        world.send(pieces, 0)
        return None
    whole = {name: torch.empty(shard.global_shape, dtype=shard.dtype) for name, shard in target.items()}
    for part in (pieces, *(world.recv(rank) for rank in range(1, world.size))):
        for name, (place, tensor) in part.items():
            whole[name][place] = tensor
    return whole
