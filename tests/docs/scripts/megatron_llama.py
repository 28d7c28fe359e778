"""Megatron-Core saves a small Llama from several processes, or loads it and tells its logits.

Called with a folder, the number of processes and steps, each ``what:stacked`` or ``what:layers``, in which form the
layers are: "save" or "logits", or the name of a checkpoint to load and check. The weights are those of
tests.docs.small_llama. The processes are forked: importing Megatron-Core takes longer than all they do.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

import shardtree as st
from shardtree.interop.megatron import from_megatron
from shardtree.testing import first_difference
from tests.docs import small_llama as small

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
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.transformer_config import TransformerConfig

filesystem_async._process_memory = lambda: 0  # it would log that, and needs psutil for it
# Dropout's random states are an accelerator's.
dot_product_attention.tensor_parallel = SimpleNamespace(get_cuda_rng_tracker=lambda: SimpleNamespace(fork=nullcontext))

WEIGHTS = small.logical_weights()
METADATA = {"stacked": None, "layers": {"non_homogeneous_layers": True, "singleton_local_shards": True}}
PREFIX = "optimizer.state.exp_avg"


def model() -> Any:
    """Return this process's part of the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=small.LAYERS,
            hidden_size=small.HIDDEN,
            num_attention_heads=small.HEADS,
            num_query_groups=small.GROUPS,
            ffn_hidden_size=small.FFN,
            layernorm_epsilon=small.EPSILON,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            persist_layer_norm=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            use_cpu_initialization=True,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            pipeline_dtype=torch.float32,
        )
        return GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            small.PADDED,
            max_sequence_length=32,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )


def value(shard: st.ShardedTensor) -> torch.Tensor:
    """Return what a shard must hold: its part of the whole tensor that the logical weights make."""
    if shard.key.startswith(PREFIX):
        return torch.full(shard.local_shape, -1.0)
    whole = torch.from_numpy(np.ascontiguousarray(small.global_tensor(WEIGHTS, shard.key)))
    return whole[shard.global_slice()].reshape(shard.local_shape)


def tensors(tree: Any) -> list[st.ShardedTensor]:
    leaves = st.trees.leaves_with_paths(st.apply_factories(from_megatron(tree)))
    return [leaf for _, leaf in leaves if isinstance(leaf, st.ShardedTensor)]


def fill(tree: Any) -> None:
    """Give the parameters their values, through the shards that view them."""
    for shard in tensors(tree):
        with torch.no_grad():
            shard.data.copy_(value(shard))


def save(folder: Path, form: str) -> None:
    sharded = model().sharded_state_dict(metadata=METADATA[form])
    parameters = {name: leaf for name, leaf in sharded.items() if isinstance(leaf.data, torch.Tensor)}
    moments = {
        name: make_sharded_optimizer_tensor(leaf, torch.empty_like(leaf.data), PREFIX)
        for name, leaf in parameters.items()
    }
    rng = dist_checkpointing.ShardedObject("rng_state", {"seed": dist.get_rank()}, (8,), (dist.get_rank(),))
    fill({**parameters, "moments": moments})
    (folder / form).mkdir(exist_ok=True)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {"model": sharded, "moments": moments, "rng": rng, "iteration": 42_000}
        dist_checkpointing.save(tree, str(folder / form))


def loaded(folder: Path, form: str) -> Any:
    """Return the model with what Megatron-Core itself loads from a folder."""
    gpt = model()
    sharded = gpt.sharded_state_dict(metadata=METADATA[form])
    wanted = {name: leaf for name, leaf in sharded.items() if isinstance(leaf.data, torch.Tensor)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dist_checkpointing.load({"model": wanted}, str(folder))
    gpt.load_state_dict(found["model"], strict=False)
    return gpt


def logits(folder: Path, form: str) -> None:
    """Store what the model answers to some words, the padded ones left out."""
    gpt = loaded(folder / form, form).eval()
    length = small.TOKENS.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        found = gpt(small.TOKENS, torch.arange(length)[None].expand_as(small.TOKENS), mask)
    torch.save(found[..., : small.VOCABULARY].clone(), folder / f"{form}.logits")


def check(name: str, folder: Path, form: str) -> None:
    """Raise unless Megatron-Core loads the rounded weights from a folder, and zeros for the padding."""
    for shard in tensors(loaded(folder / name, form).sharded_state_dict(metadata=METADATA[form])):
        right = value(shard).bfloat16().float()
        if "embedding" in shard.key or "output_layer" in shard.key:
            right[max(0, small.VOCABULARY - shard.global_offset[0]) :] = 0
        assert first_difference(shard.data.detach(), right) is None, shard.key


def run(rank: int, processes: int, folder: str, steps: list[str]) -> None:
    store = dist.FileStore(f"{folder}/{'-'.join(steps)}.store".replace(" ", "-"), processes)
    dist.init_process_group("gloo", rank=rank, world_size=processes, store=store)
    tensor, stages = (small.TENSOR, small.PIPELINE) if processes == 8 else (processes, 1)
    parallel_state.initialize_model_parallel(tensor, stages)
    for step in steps:
        name, form = step.split(":")
        {"save": save, "logits": logits}.get(name, partial(check, name))(Path(folder), form)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[2])
    start_processes(run, (count, sys.argv[1], sys.argv[3:]), nprocs=count, start_method="fork")
