"""A GPT of Megatron-Core's, sharded over all processes, is saved or loaded through shardtree."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

import shardtree as st
from shardtree.interop.megatron import from_megatron, to_megatron
from shardtree.testing import first_difference

if not torch.cuda.is_available():  # Megatron-Core waits for an accelerator all the same, and asks which it is
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what isn't installed
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

filesystem_async._process_memory = lambda: 0  # it would log that, and needs psutil for it

LAYERS, HIDDEN, VOCABULARY = 2, 16, 24
COMMON = {"iteration": 42, "args": {"hidden_size": HIDDEN, "betas": (0.9, 0.95)}}


def model() -> Any:
    """Return a small GPT with gated layers, of which each process holds its part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            ffn_hidden_size=2 * HIDDEN,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            use_cpu_initialization=True,
            tensor_model_parallel_size=dist.get_world_size(),
        )
        spec = get_gpt_layer_local_spec()
        return GPTModel(config, spec, VOCABULARY, max_sequence_length=8, share_embeddings_and_output_weights=False)


def state(gpt: Any) -> dict[str, Any]:
    """Return the model's sharded state, a moment of an optimizer for each parameter, and common values."""
    sharded = gpt.sharded_state_dict()
    tensors = {name: leaf for name, leaf in sharded.items() if isinstance(leaf.data, torch.Tensor)}
    moments = {
        name: make_sharded_optimizer_tensor(leaf, torch.empty_like(leaf.data), "optimizer.exp_avg")
        for name, leaf in tensors.items()
    }
    objects = {"rng": dist_checkpointing.ShardedObject("rng", {"seed": 1}, (1,), (0,), dist.get_rank())}
    local = dist_checkpointing.LocalNonpersistentObject(dist.get_rank())
    return {"model": sharded, "moments": moments, "objects": objects, "local": local, **COMMON}


def value(shard: st.ShardedTensor) -> torch.Tensor:
    """Return what a shard must hold: its part of a global tensor whose elements follow from its key and shape."""
    whole = torch.arange(torch.Size(shard.global_shape).numel()).reshape(shard.global_shape) + crc32(shard.key.encode())
    return (whole % 8191).to(shard.dtype)[shard.global_slice()]


def fill(tree: Any) -> None:
    """Give the model's own memory, and that of its moments, their values, through the shards that view it."""
    for _, leaf in st.trees.leaves_with_paths(st.apply_factories(from_megatron(tree))):
        if isinstance(leaf, st.ShardedTensor):
            with torch.no_grad():
                leaf.data.copy_(value(leaf))


def expected(tree: Any) -> Any:
    """Return what a load into the tree must give: factories merged, all data as the keys say."""
    ours = from_megatron(tree)
    built = st.map_shards(_loaded, st.apply_factories(ours))
    return st.apply_factory_merges(built, ours)


def _loaded(leaf: Any) -> Any:
    if isinstance(leaf, st.ShardedTensor):
        return value(leaf)
    return leaf.data if isinstance(leaf, st.ShardedObject) else getattr(leaf, "obj", leaf)


def check_same(found: Any, tree: Any) -> None:
    """Raise unless what was loaded is what the tree's keys say, on this process."""
    right = dict(st.trees.leaves_with_paths(expected(tree)))
    left = dict(st.trees.leaves_with_paths(found))
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    for path, leaf in left.items():
        same = leaf == right[path] if not isinstance(leaf, torch.Tensor) else not first_difference(leaf, right[path])
        assert same, f"process {dist.get_rank()}: {path}: {leaf}, not {right[path]}"


def save(folder: str, backend: str) -> None:
    gpt = model()
    tree = state(gpt)
    fill(tree)
    st.save(from_megatron(tree), Path(folder) / backend, (backend, 1), options=st.SaveOptions(durable=False))


def save_theirs(folder: str, _: str) -> None:
    tree = state(model())
    fill(tree)
    (Path(folder) / "theirs").mkdir(exist_ok=True)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist_checkpointing.save(tree, str(Path(folder) / "theirs"))


def load(folder: str, backend: str) -> None:
    gpt = model()
    tree = state(gpt)
    loaded = st.load(from_megatron(tree), Path(folder) / backend)
    check_same(loaded, tree)
    gpt.load_state_dict(loaded["model"])
    assert all(not first_difference(leaf.data, value(leaf)) for leaf in shards(gpt))
    # There and back, the tree is Megatron-Core's again.
    check_same(st.load(from_megatron(to_megatron(from_megatron(tree))), Path(folder) / backend), tree)


def load_swapped(folder: str, backend: str) -> None:
    """The planted fault: gate and value halves change places on the way."""
    tree = state(model())
    ours = from_megatron(tree)
    fc1 = ours["model"]["decoder.layers.1.mlp.linear_fc1.weight"]
    ours["model"]["decoder.layers.1.mlp.linear_fc1.weight"] = replace(
        fc1, merge_fn=lambda halves: torch.cat(halves[::-1])
    )
    try:
        check_same(st.load(ours, Path(folder) / backend), tree)
    except AssertionError as error:
        assert "linear_fc1" in str(error)
    else:
        raise RuntimeError("swapped halves went unseen")


def shards(gpt: Any) -> list[st.ShardedTensor]:
    leaves = st.trees.leaves_with_paths(st.apply_factories(from_megatron(gpt.sharded_state_dict())))
    return [leaf for _, leaf in leaves if isinstance(leaf, st.ShardedTensor)]


def load_theirs(folder: str, backend: str) -> None:
    """Megatron-Core's own load of what we saved gives what ours gives."""
    tree = state(model())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dist_checkpointing.load(tree, str(Path(folder) / backend))
    check_same(loaded, state(model()))


STEPS = {
    "save": save,
    "load": load,
    "save theirs": save_theirs,
    "load theirs": load_theirs,
    "load swapped": load_swapped,
}


def one_rank(rank: int, size: int, folder: str, group: str, steps: list[str]) -> None:
    dist.init_process_group("gloo", init_method=group, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    for step in steps:
        name, backend = step.split(":")
        STEPS[name](folder, backend)
        dist.barrier()
    dist.destroy_process_group()


def main(folder: str, *arguments: str) -> None:
    """Run steps on several processes, which are forked, so that Megatron-Core is imported once: ``2,save:a,load:a``."""
    for number, argument in enumerate(arguments):
        size, *steps = argument.split(",")
        group = f"file://{folder}/group-{number}"
        jobs = [
            get_context("fork").Process(target=one_rank, args=(rank, int(size), folder, group, steps))
            for rank in range(int(size))
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        if any(job.exitcode for job in jobs):
            sys.exit(f"{argument}: exit codes {[job.exitcode for job in jobs]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
