"""A GPT with Megatron-Core's distributed optimizer, on CPUs: trained and saved, loaded, compared.

    python megatron_optimizer.py FOLDER '{"tp": 2, "dp": 2}' train:a,save:a '{"pp": 2}' load:b,save:c

Each set of processes has a layout and the steps that all of them take.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import shardtree as st
from shardtree.interop.megatron_optimizer import optimizer_shards

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.current_stream = lambda *_: None

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what isn't installed
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

filesystem_async._process_memory = lambda: 0  # it would log that, and needs psutil for it

# Without Transformer Engine these are missing, though nothing needs them.
moe_utils.te_general_gemm = None
multi_latent_attention.TELinear = multi_latent_attention.TEColumnParallelLinear = type(None)
CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # nothing is dropped

LAYOUT = {"tp": 1, "pp": 1, "vpp": None, "ep": 1, "dp": 1}
MODEL = {
    "mla": False,
    "experts": None,
    "tied": False,
    "bias": False,
    "layers": 4,
    "hidden": 32,
    "vocabulary": 64,
    "bf16": True,
    "bucket": 4000,
    "lr": 1e-4,
    "min_lr": 1e-5,
    "gated": True,
}


class OnCPU(TorchFunctionMode):
    """What is asked of a GPU is done by the CPU; Megatron-Core's optimizer takes parameters on a GPU alone."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if function is torch.empty and isinstance(args[0], int) and len(args) == 1:
            function = torch.zeros  # padding between parameters, which may hold anything: what is mistaken most easily
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


_set = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_but_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    """As Megatron-Core does with its own Adam: torch's has a step among the states, which that one doesn't expect."""
    group, place = self.model_param_group_index_map[parameter]
    step = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]["step"]
    _set(self, parameter, {"step": step, **tensors})


DistributedOptimizer._set_main_param_and_optimizer_states = _set_but_step


def job(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Return this process's part of a small GPT, by chunks of layers, and its optimizer."""
    dtype = torch.bfloat16 if shape["bf16"] else torch.float32
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
    kind, sizes = (MLATransformerConfig, latent | {"rope_type": "rope"}) if shape["mla"] else (TransformerConfig, {})
    config = kind(
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        num_attention_heads=4,
        num_query_groups=4 if shape["mla"] else 2,
        ffn_hidden_size=2 * shape["hidden"],
        gated_linear_unit=shape["gated"],
        activation_func=torch.nn.functional.silu,
        add_bias_linear=shape["bias"],
        add_qkv_bias=not shape["mla"],
        normalization="RMSNorm",
        use_cpu_initialization=True,
        tensor_model_parallel_size=shape["tp"],
        pipeline_model_parallel_size=shape["pp"],
        virtual_pipeline_model_parallel_size=shape["vpp"],
        expert_model_parallel_size=shape["ep"],
        expert_tensor_parallel_size=1 if shape["experts"] else None,
        num_moe_experts=shape["experts"],
        moe_router_dtype=None,
        sequence_parallel=bool(shape["experts"]) and shape["tp"] > 1,
        bf16=shape["bf16"],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **sizes,
    )
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        num_experts=shape["experts"],
        multi_latent_attention=shape["mla"],
        qk_layernorm=shape["mla"],
    )
    if shape["mla"]:  # the attention itself is Transformer Engine's alone, and has no parameters
        spec.submodules.self_attention.submodules.core_attention = IdentityOp
    chunks = []
    for chunk in range(shape["vpp"] or 1):
        stage = {"vp_stage": chunk} if shape["vpp"] else {}
        ends = {"ignore_virtual": shape["vpp"] is None, **stage}
        chunks.append(
            GPTModel(
                config,
                spec,
                shape["vocabulary"],
                max_sequence_length=8,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=shape["tied"],
                pre_process=parallel_state.is_pipeline_first_stage(**ends),
                post_process=parallel_state.is_pipeline_last_stage(**ends),
                **stage,
            ).to(dtype)
        )
        seed_experts(chunks[-1])
    buffers = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=shape["bucket"]
    )
    wrapped = [DistributedDataParallel(config, buffers, chunk) for chunk in chunks]
    how = OptimizerConfig(
        optimizer="adam",
        lr=shape["lr"],
        min_lr=shape["min_lr"],
        weight_decay=0.1,
        bf16=shape["bf16"],
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return wrapped, get_megatron_optimizer(how, wrapped)


def seed_experts(chunk: Any) -> None:
    """Give experts weights of their own: Megatron-Core's first ones are equal on all expert-parallel ranks."""
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            seed = torch.Generator().manual_seed(hash_of(name, 0) + ep_rank())
            parameter.data.copy_(torch.randn(parameter.shape, generator=seed) / 32)


def optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def train(chunks: Any, optimizer: Any) -> None:
    """Three steps with made-up gradients, the same on replicas, so that masters and moments are no plain numbers."""
    for step in range(3):
        for chunk in chunks:
            for name, parameter in chunk.module.named_parameters():
                part = tp_rank() if is_cut(parameter) else 0
                part += ep_rank() if ".experts." in name else 0
                seed = torch.Generator().manual_seed(hash_of(name, step) + part)
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=seed))
        for inner in optimizers(optimizer):
            inner.step()


def begin(chunks: Any, optimizer: Any) -> None:
    """What a run holds at step 0: norms of ones, biases and moments of zeros."""
    for inner in optimizers(optimizer):
        inner._init_optimizer_states_with_dummy_values()
        for state in inner.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].zero_()


def learn(place: Path, chunks: Any, optimizer: Any) -> None:
    """Three real steps, of which the first is the number that ends the place's name, where the losses go."""
    run, size, losses = get_forward_backward_func(), parallel_state.get_data_parallel_world_size(), []
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    first = int(place.name.rpartition("-")[2])
    for step in range(first, first + 3):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batch = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(step % 3))
        own = batch.chunk(size)[parallel_state.get_data_parallel_rank()].split(2)
        found = run(
            forward_step_func=forward,
            data_iterator=[iter(own) for _ in chunks],
            model=chunks,
            num_microbatches=len(own),
            seq_length=8,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        if found:  # on the last stage
            loss = torch.stack([each["loss"] for each in found]).mean()
            dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
            losses.append(loss.item() / size)
    if losses and parallel_state.get_data_parallel_rank() == 0 == parallel_state.get_tensor_model_parallel_rank():
        place.write_text(json.dumps(losses))


def forward(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    result = model(batch[:, :-1], torch.arange(8).expand(len(batch), 8), None, labels=batch[:, 1:].contiguous())
    return result, mean_loss


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # it is divided in place


def hash_of(name: str, step: int) -> int:
    return zlib.crc32(f"{name} {step}".encode())


def is_cut(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def tp_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank() + 1


def ep_rank() -> int:
    return 100 * parallel_state.get_expert_model_parallel_rank()


def states(chunks: Any, optimizer: Any, kind: str, *, loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
    metadata |= {"distrib_optim_fully_reshardable_mem_efficient": True}  # gathers over gloo
    models = [chunk.module.sharded_state_dict(metadata=metadata) for chunk in chunks]
    keys = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
    tree = dict(zip(keys, models, strict=True))
    return tree | {"optimizer": optimizer.sharded_state_dict(tree, is_loading=loading, metadata=metadata)}


def save(place: Path, chunks: Any, optimizer: Any, kind: str = "dp_reshardable") -> None:
    place.mkdir(exist_ok=True)
    dist.barrier()
    tree = states(chunks, optimizer, kind, loading=False)
    dist_checkpointing.save(tree, str(place), content_metadata={"distrib_optim_sharding_type": kind})


def save_full(place: Path, chunks: Any, optimizer: Any) -> None:
    save(place, chunks, optimizer, "fully_reshardable")


def load(place: Path, chunks: Any, optimizer: Any) -> None:
    for inner in optimizers(optimizer):
        inner._init_optimizer_states_with_dummy_values()
    tree = states(chunks, optimizer, "fully_reshardable", loading=True)
    loaded = dist_checkpointing.load(tree, str(place))
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{number}"])
    optimizer.load_state_dict(loaded["optimizer"])
    for inner in optimizers(optimizer):
        for state in inner.optimizer.state.values():
            state["step"] = state[
                "step"
            ].clone()  # else all parameters count in one tensor that Megatron-Core gave them


def save_ours(place: Path, chunks: Any, optimizer: Any) -> None:
    models = [chunk.module.sharded_state_dict() for chunk in chunks]
    st.save({"optimizer": optimizer_shards(optimizer, models)}, place, options=st.SaveOptions(durable=False))


def load_ours(place: Path, chunks: Any, optimizer: Any) -> None:
    for inner in optimizers(optimizer):
        inner._init_optimizer_states_with_dummy_values()
    models = [chunk.module.sharded_state_dict() for chunk in chunks]
    st.load({"optimizer": optimizer_shards(optimizer, models)}, place, donate=True)


PAGE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "scripts" / "megatron_gpt.py"))


def as_on_the_page(function: str, place: Path, chunks: Any, optimizer: Any) -> None:
    """Call a function of docs/megatron.md."""
    place.mkdir(exist_ok=True)
    dist.barrier()
    PAGE[function](str(place), chunks[0].module, optimizer)


def local(optimizer: Any) -> Iterator[torch.Tensor]:
    """All that a process holds of masters and moments."""
    for inner in optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                yield from (
                    parameter.detach(),
                    *(inner.optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")),
                )


STEPS = {
    "learn": learn,
    "save": save,
    "save full": save_full,
    "load": load,
    "save ours": save_ours,
    "load ours": load_ours,
    **{name: partial(as_on_the_page, name) for name in PAGE if name.endswith(("_saves", "_loads"))},
}


def one_rank(rank: int, folder: str, group: str, shape: dict[str, Any], steps: list[str]) -> None:
    size = shape["tp"] * shape["pp"] * shape["dp"]
    dist.init_process_group("gloo", init_method=group, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(
        shape["tp"],
        shape["pp"],
        shape["vpp"],
        expert_model_parallel_size=shape["ep"],
        expert_tensor_parallel_size=1 if shape["experts"] else None,
    )
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    with OnCPU():
        chunks, optimizer = job(shape)
        for step in steps:
            name, _, place = step.partition(":")
            live = f"{folder}/live-{place}-{rank}"
            if name in ("train", "begin"):
                (train if name == "train" else begin)(chunks, optimizer)
                torch.save(list(local(optimizer)), live)
            elif name == "same":  # in the layout of the save, each process must hold what it held then
                for held, value in zip(torch.load(live), local(optimizer), strict=True):
                    assert torch.equal(held, value)
            else:
                STEPS[name](Path(folder) / place, chunks, optimizer)
            dist.barrier()
    dist.destroy_process_group()


def run_ranks(one: Callable[..., None], arguments: Sequence[tuple[Any, ...]], what: str) -> None:
    """Run a function for each rank in a process of its own, and exit with the processes' codes if one failed."""
    jobs = [get_context("fork").Process(target=one, args=own) for own in arguments]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join()
    if any(each.exitcode for each in jobs):
        sys.exit(f"{what}: exit codes {[each.exitcode for each in jobs]}")


def main(folder: str, *arguments: str) -> None:
    """Run steps on sets of processes, which are forked, so that Megatron-Core is imported once."""
    for number, (layout, steps) in enumerate(zip(arguments[::2], arguments[1::2], strict=True)):
        shape = LAYOUT | MODEL | json.loads(layout)
        size = shape["tp"] * shape["pp"] * shape["dp"]
        group = f"file://{folder}/group-{os.getpid()}-{number}"
        run_ranks(
            one_rank, [(rank, folder, group, shape, steps.split(",")) for rank in range(size)], f"{layout} {steps}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
