"""The page's lists of other programs' folders: each entry is tried, on a real folder where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardtree as st
from shardtree.errors import CheckpointingException
from shardtree.interop.megatron_optimizer import model_space
from shardtree.storage import MemoryStorage
from shardtree.strategies import LoadOptions
from tests.faults.test_nothing_runs import Payload
from tests.formats import test_deepspeed as deepspeed
from tests.formats import test_dp_reshardable_fixture as reshardable
from tests.formats import test_dtensor_files as dtensors
from tests.formats import test_megatron_optimizer_types as types
from tests.formats.buckets import Job, layer_kinds, write
from tests.formats.optimizer_formats import FIXTURES, Tensors, wrong_in_layout
from tests.formats.test_torch_dist_fixtures import FLAT, value
from tests.formats.zero_folders import Save, folder_of, put
from tests.interop.dtensor_cases import Case
from tests.shell.table.folders import archive

PAGE = Path(__file__).parents[2] / "docs" / "optimizer-states.md"

Try = Callable[[Path], list[str]]
"""Returns the keys that are wrong after a load in another layout; raises where the folder is refused."""


def loaded(folder: Any, expected: Tensors, options: LoadOptions | None = None) -> list[str]:
    assert expected
    return wrong_in_layout(folder, expected, "columns", options)


def edited(_: Path) -> list[str]:
    job, folder = Job(layer_kinds(16)), MemoryStorage()
    job.weights["decoder.layers.mlp.linear_fc2.weight"].view(-1)[-1] += 1
    write(job, folder)
    return loaded(folder, job.truth)


def fully_reshardable(place: Path, **options: Any) -> list[str]:
    opened = st.open_checkpoint(reshardable.FOLDER)
    st.convert(reshardable.FOLDER, place / "full", backend="torch_dist", **model_space(opened), **options)
    return loaded(place / "full", reshardable.TRUTH)


def with_shifted_masters(tree: dict[str, Any]) -> dict[str, Any]:
    key = "optimizer.state.param.output_layer.weight"
    return tree | {key: st.ShardedTensor.from_rank_offsets(key, tree[key].data.read().roll(64))}


def model_space_of_old(_: Path) -> list[str]:
    shapes = {"layer.weight": (8, 6), "layer.weight_ax1": (8, 6), "layer.bias": (12,)}
    keys = {f"optimizer.state.exp_avg.{name}": shape for name, shape in shapes.items()}
    return loaded(FIXTURES / FLAT, {key: value(key, shape, torch.float32) for key, shape in keys.items()})


def in_objects(_: Path) -> list[str]:
    folder = MemoryStorage()
    states = st.ShardedObject("optimizer.distributed.dp_group_idx_0.param_state", {"a": types.WEIGHT}, (1,), (0,))
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", types.WEIGHT), "o": states}, folder, ("torch_dist", 1))
    return loaded(folder, {"optimizer.state.exp_avg.w": types.WEIGHT})


def round_robin(_: Path) -> list[str]:
    found = st.load_plain_tensors(FIXTURES / "deepspeed_round_robin", options=LoadOptions(verify=None))
    masters = {name: found[f"optimizer.state.param.{name}"] for name in (*deepspeed.DECAYED, *deepspeed.REST)}
    wrong = [name for name, master in masters.items() if not master.to(torch.bfloat16).equal(found[name])]
    return wrong + loaded(FIXTURES / "deepspeed_round_robin", found)


def made(save: Save) -> list[str]:
    return loaded(folder_of(save), save.expected())


def universal(_: Path) -> list[str]:
    root = FIXTURES / "deepspeed_universal"
    return loaded(root / "global_step3_universal", st.load_plain_tensors(root))


def exchanged(place: Path, fixture: str, one: str, other: str) -> list[str]:
    shutil.copytree(FIXTURES / fixture, place / "copy")
    for name, held in ((one, other), (other, one)):
        shutil.copy(FIXTURES / fixture / held, place / "copy" / name)
    return list(st.load_plain_tensors(place / "copy"))


def exchanged_optimizers(place: Path) -> list[str]:
    names = (f"global_step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    return exchanged(place, "deepspeed_zero1_dp2", *names)


def of_a_pipeline(_: Path) -> list[str]:
    folder = folder_of(deepspeed.SAVE)
    put(folder, "step_3/layer_03-model_00-model_states.pt", b"")
    return list(st.open_checkpoint(folder))


def buffers(_: Path) -> list[str]:
    folder = dtensors.folder_of([{"scale": torch.ones(1)} for _ in range(8)])
    return loaded(folder, {"scale": torch.ones(1)})


def over_tensor_parallelism(_: Path) -> list[str]:
    case = Case(
        torch.randn(8, 3), torch.arange(4).view(2, 2), ("fsdp", "tp"), (_StridedShard(0, split_factor=2), Shard(0))
    )
    return loaded(dtensors.folder_of_case(case), {"w": case.whole})


def with_payload(place: Path) -> list[str]:
    folder, note = folder_of(deepspeed.SAVE), Payload(place / "it ran")
    folder.replace("step_3/mp_rank_00_model_states.pt", archive({"note": note}), durable=False)
    return list(st.open_checkpoint(folder))


ROWS: dict[str, Try] = {
    "Megatron-Core, `dp_reshardable`": lambda _: loaded(reshardable.FOLDER, reshardable.TRUTH | reshardable.STEPS),
    "Megatron-Core, `dp_reshardable` with an edited weight": edited,
    "Megatron-Core, `fully_reshardable`": fully_reshardable,
    "Megatron-Core, `fully_reshardable` with states under other names": lambda place: fully_reshardable(
        place, transform=with_shifted_masters, verify=False
    ),
    "Megatron-Core, `fully_sharded_model_space`": model_space_of_old,
    "Megatron-Core, states in `dp_zero_gather_scatter`": in_objects,
    "DeepSpeed, ZeRO-1 and 2": lambda _: loaded(
        FIXTURES / "deepspeed_zero1_dp2", deepspeed.expected("deepspeed_zero1_dp2")
    ),
    "DeepSpeed, `round_robin_gradients`": round_robin,
    "DeepSpeed, BF16_Optimizer": lambda _: made(replace(deepspeed.SAVE, form="bf16_optimizer")),
    "DeepSpeed, ZeRO-3": lambda _: loaded(FIXTURES / "deepspeed_zero3_dp4", deepspeed.expected("deepspeed_zero3_dp4")),
    "DeepSpeed, Universal Checkpoint": universal,
    "DeepSpeed, exchanged optimizer files of ZeRO-1 and 2": exchanged_optimizers,
    "DeepSpeed, tensor parallelism, pipelines, experts": of_a_pipeline,
    "verl, files of all ranks": lambda _: loaded(dtensors.FOLDER, dtensors.EXPECTED, dtensors.NAMED),
    "verl, a buffer of one element on each rank": buffers,
    "verl, FSDP2 over tensor parallelism": over_tensor_parallelism,
    "verl, exchanged files of ranks": lambda place: exchanged(
        place, "dtensor_fsdp2_w4", "model_world_size_4_rank_0.pt", "model_world_size_4_rank_1.pt"
    ),
    "Any, a pickle that names what isn't data": with_payload,
}


def entries() -> dict[str, bool]:
    """Return whether each folder that the page lists opens."""
    found = {}
    for line, opens in (("These open:", True), ("These are refused:", False)):
        (_, text) = PAGE.read_text().split(f"{line}\n\n")
        for item in text.partition("\n\n")[0].removeprefix("- ").split("\n- "):
            program, _, folders = item.partition(": ")
            found |= {f"{program}, {folder}": opens for folder in folders.removesuffix(".").split("; ")}
    return found


def test_the_lists_have_the_folders_that_are_tried() -> None:
    assert sorted(entries()) == sorted(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_what_the_lists_say_is_so(row: str, tmp_path: Path) -> None:
    if entries()[row]:
        assert ROWS[row](tmp_path) == []
    else:
        with pytest.raises(CheckpointingException):
            ROWS[row](tmp_path)
