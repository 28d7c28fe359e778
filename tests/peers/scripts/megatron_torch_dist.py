"""Megatron-Core saves and loads the model's state, each step ``what:tp:pp:folder`` with a process for each rank.

What differs from the state is printed as JSON, by step. The ranks are forked, so that Megatron-Core is imported once.
"""

from __future__ import annotations

import json
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# On a machine without an accelerator it asks for one all the same, to wait for it and to say where a flag should live.
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import mapping  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402

from tests.peers.lens_state import lens_tree  # noqa: E402
from tests.peers.model_state import (  # noqa: E402
    CONTENT,
    KINDS,
    cleared,
    common,
    differences,
    rank_tree,
    whole,
)

filesystem_async._process_memory = lambda: 0  # it would log that, and needs psutil for it


def main() -> None:
    folder = Path(sys.argv[1])
    print(json.dumps({step: in_processes(folder, step) for step in sys.argv[2:]}))  # noqa: T201


def in_processes(folder: Path, step: str) -> list[str]:
    """Return what the ranks of a step say, each in a process of its own."""
    what, tp, pp, name = step.split(":")
    fork, size = get_context("fork"), int(tp) * int(pp)
    pipes = [fork.Pipe(duplex=False) for _ in range(size)]
    (folder / name).mkdir(exist_ok=True)
    group = f"file://{folder}/group-{step.replace(':', '-')}"
    jobs = [
        fork.Process(target=one_rank, args=(rank, size, group, what, int(tp), int(pp), str(folder / name), sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for job in jobs:
        job.start()
    for _, sender in pipes:
        sender.close()
    found = [line for receiver, _ in pipes for line in heard(receiver)]
    for job in jobs:
        job.join()
    return found


def heard(receiver: Any) -> list[str]:
    try:
        return receiver.recv()
    except EOFError:
        return ["a rank failed"]


def one_rank(rank: int, size: int, group: str, what: str, tp: int, pp: int, folder: str, sender: Any) -> None:
    dist.init_process_group("gloo", init_method=group, rank=rank, world_size=size)
    t, p = rank % tp, rank // tp
    own = {"model": rank_tree(mapping, tp, pp, t, p), **common()}
    if what == "save":
        dist_checkpointing.save(own, folder, content_metadata=CONTENT)
        sender.send([])
    elif what == "look":
        sender.send(looked_at(folder))
    elif what == "lenses":
        sender.send(through_lenses(folder))
    else:
        loaded = dist_checkpointing.load(cleared(mapping, own, objects=what == "load all"), folder)
        expected = {"model": rank_tree(mapping, tp, pp, t, p), **common(), "content_metadata": CONTENT}
        if what != "load all":
            del expected["model"]["rng"]
        sender.send([f"rank {rank}: {line}" for line in differences(expected, loaded)])
    dist.barrier()
    dist.destroy_process_group()


def through_lenses(folder: str) -> list[str]:
    """Return what differs after a save and a load of our factories, with the states that their optimizers make."""
    dist_checkpointing.save(lens_tree(), folder)
    loaded = dist_checkpointing.load(lens_tree(zeros=True), folder)
    expected = {key: factory.data for key, factory in lens_tree().items()}
    return differences(expected, loaded)


def looked_at(folder: str) -> list[str]:
    """Return what differs in tensors that are loaded whole, in one with more rows than were saved, and in the rest."""
    found = dist_checkpointing.load_plain_tensors(folder)  # beside the common state
    lines = differences({key: whole(key) for key in KINDS}, {key: found.get(key) for key in KINDS})
    padded = mapping.ShardedTensor.from_rank_offsets("embedding.weight", torch.ones(26, 16), allow_shape_mismatch=True)
    loaded = dist_checkpointing.load({"padded": padded}, folder)["padded"]
    lines += differences(torch.cat([whole("embedding.weight"), torch.zeros(2, 16)]), loaded, "padded")
    lines += differences(CONTENT, dist_checkpointing.load_content_metadata(folder), "content")
    grid = [f"rng_state/shard_{stage}.{t}_2.2" for stage in range(2) for t in range(2)]
    stored = dist_checkpointing.serialization.load_sharded_metadata(folder)
    lines += differences(
        sorted(stored), sorted([*KINDS, *(f"layers.extra_state/shard_{layer}_4" for layer in range(4)), *grid]), "keys"
    )
    return lines


if __name__ == "__main__":
    main()
