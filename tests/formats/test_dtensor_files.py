"""Files of DTensors, one for each rank, open as they are: any mesh, any later layout, nothing concatenated."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as some
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardtree as st
from shardtree.errors import CorruptCheckpoint, KeyMismatch, TreeError, UnsupportedValue
from shardtree.formats.pickles import Global, New, Persistent, Reduced, write_pickle
from shardtree.formats.rank_archives import _parts
from shardtree.storage import MemoryStorage
from shardtree.strategies import LoadOptions
from tests.formats.optimizer_formats import FIXTURES, truth
from tests.interop.dtensor_cases import Case, as_fsdp2, cases, numbered
from tests.shell.table import folders
from tests.shell.table.folders import archive

FOLDER = FIXTURES / "dtensor_fsdp2_w4"
FILES = {path.stem: path.read_bytes() for path in FOLDER.glob("*.pt")}
EXPECTED, ORDER = truth("dtensor_fsdp2_w4")
NAMED = LoadOptions(parameter_names=ORDER)


def folder_of(ranks: list[dict[str, Any]], kind: str = "model") -> MemoryStorage:
    storage = MemoryStorage()
    for rank, state in enumerate(ranks):
        name = f"{kind}_world_size_{len(ranks)}_rank_{rank}.pt"
        storage.write(name, [memoryview(archive(OrderedDict(state)))], durable=False)
    return storage


def folder_with(**changes: bytes | None) -> MemoryStorage:
    """Return the real folder's files, some of which are others or gone."""
    return folders.folder_of({f"{name}.pt": data for name, data in (FILES | changes).items() if data is not None})


def folder_of_case(case: Case) -> MemoryStorage:
    return folder_of([{"w": tensor} for _, tensor in sorted(case.dtensors().items())])


# A real folder


def test_every_tensor_is_what_the_model_had() -> None:
    opened = st.open_checkpoint(FOLDER, parameter_names=ORDER)
    assert {key: opened[key].data.read().equal(tensor) for key, tensor in EXPECTED.items()} == dict.fromkeys(
        EXPECTED, True
    )
    assert set(EXPECTED) == {key for key in opened if not key.startswith("rng/")}


def test_without_names_states_keep_their_numbers_and_the_error_says_so() -> None:
    assert "optimizer.state.exp_avg.10" in st.open_checkpoint(FOLDER)
    with pytest.raises(KeyMismatch, match=r"parameter_names=\[...\]"):
        st.load({"w": st.load_tensors_metadata(FOLDER, options=NAMED)["optimizer.state.exp_avg.emb.weight"]}, FOLDER)


WRONG_NAMES = {
    "more": [["x"], *ORDER],
    "another order": [ORDER[1], ORDER[0]],
    "one twice": [ORDER[0], [*ORDER[1][:-1], ORDER[1][0]]],
    "shapes of others": [[ORDER[0][1], ORDER[0][0], *ORDER[0][2:]], ORDER[1]],
    "unknown": [["emb.wait", *ORDER[0][1:]], ORDER[1]],
}


@pytest.mark.parametrize("wrong", WRONG_NAMES)
def test_names_that_do_not_fit_are_refused(wrong: str) -> None:
    with pytest.raises(TreeError, match=r"parameter_names=...\) does not match .*optim_world_size_4_rank_0"):
        st.open_checkpoint(FOLDER, parameter_names=WRONG_NAMES[wrong])


def test_what_each_rank_has_of_its_own_is_an_object() -> None:
    opened = st.open_checkpoint(FOLDER)
    states = [opened[f"rng/shard_{rank}_4"].data for rank in range(4)]
    assert states[0]["cpu"].dtype == torch.uint8 and len(states[3]["random"][1]) == 625
    assert opened.common()["lr_scheduler"]["last_epoch"] == 3
    assert [group["lr"] for group in opened.common()["optimizer"]["param_groups"]] == [0.0025, 0.00125]


def test_a_stray_safetensors_file_makes_no_model_of_it() -> None:
    assert (FOLDER / "truth.safetensors").exists()
    assert st.open_checkpoint(FOLDER).checkpoint.fields["sharded_backend"] == "dtensor_files"


def test_a_flipped_bit_is_found_as_it_is_read() -> None:
    flipped = folders.flipped(FILES, "optim_world_size_4_rank_2", 8 * 7872)
    with pytest.raises(CorruptCheckpoint):
        st.load_plain_tensors(folder_with(**flipped))


# What mergers get wrong


def test_ranks_are_numbers() -> None:
    rows = Case(numbered((24, 2)), torch.arange(12), ("fsdp",), (Shard(0),))
    assert torch.equal(st.load_plain_tensors(folder_of_case(rows))["w"], rows.whole)


# Other meshes. DTensors of all ranks are made in one process, since making them communicates nothing


def loads(case: Case) -> bool:
    return torch.equal(st.load_plain_tensors(folder_of_case(case))["w"], case.whole)


@given(cases())
def test_any_mesh_and_placements_load_or_are_refused(case: Case) -> None:
    try:
        assert loads(case)
    except UnsupportedValue:
        # Pieces that strided cuts leave on a rank aren't one box, unless the axes to their right have cut before.
        assert any(isinstance(placement, _StridedShard) for placement in case.placements)


def test_the_law_catches_even_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parts, "chunk", lambda length, pieces, at: (at * (length // pieces), length // pieces))
    with pytest.raises(UnsupportedValue):
        loads(Case(numbered((7, 2)), torch.arange(4), None, (Shard(0),)))


@given(some.integers(1, 9), some.sampled_from([(2, 2), (3, 2), (2, 3)]))
def test_fsdp2_cuts_what_tensor_parallelism_left(rows: int, sizes: tuple[int, int]) -> None:
    placements = (_StridedShard(0, split_factor=sizes[1]), Shard(0))
    case = Case(numbered((rows, 3)), torch.arange(sizes[0] * sizes[1]).view(sizes), ("fsdp", "tp"), placements)
    tensors = case.dtensors()
    for rank, tensor in tensors.items():
        tensor._local_tensor = as_fsdp2(case, rank)
    loaded = st.load_plain_tensors(folder_of([{"w": tensors[rank]} for rank in sorted(tensors)]))
    assert torch.equal(loaded["w"], case.whole)


def test_terms_of_a_sum_are_refused_by_name() -> None:
    case = Case(numbered((4, 2)), torch.arange(2), None, (Replicate(),))
    tensors = [tensor for _, tensor in sorted(case.dtensors().items())]
    for tensor in tensors:
        tensor._spec.placements = (Partial(),)
    with pytest.raises(UnsupportedValue, match=r"'w': .*rank_0.pt' has a Partial placement"):
        st.load_plain_tensors(folder_of([{"w": tensor} for tensor in tensors]))


# Files that don't belong together


@pytest.mark.slow
@given(some.permutations(range(4)))
def test_a_permuted_rank_file_is_refused(order: list[int]) -> None:
    assume(order != [0, 1, 2, 3])
    name = "model_world_size_4_rank_{}".format
    folder = folder_with(**{name(rank): FILES[name(other)] for rank, other in enumerate(order)})
    with pytest.raises(CorruptCheckpoint, match=r"rank_\d.pt' is another rank's file\n  found rank \d's part"):
        st.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("optim_world_size_4_rank_1", FILES["optim_world_size_4_rank_2"], "expected rank 1's part"),
        ("model_world_size_4_rank_2", None, r"lacks ranks' files\n  model_world_size_4_rank_2.pt"),
        ("model_world_size_8_rank_0", FILES["model_world_size_4_rank_0"], "a save by 4 ranks and of a save by 8 ranks"),
    ],
    ids=["copied", "missing", "two world sizes"],
)
def test_files_that_are_not_one_save_s_are_refused(name: str, data: bytes | None, said: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=said):
        st.open_checkpoint(folder_with(**{name: data}))


def test_rows_that_no_rank_has_are_named() -> None:
    case = Case(numbered((4, 2)), torch.arange(2), None, (Shard(0),))
    with pytest.raises(CorruptCheckpoint, match="'w': 4 of 8 elements"):
        st.open_checkpoint(folder_of([{"w": case.dtensor(0)}, {}]))


# Pickles


def with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> MemoryStorage:
    """Return a folder of one rank's file, an archive with a changed pickle."""
    out, storage = io.BytesIO(), MemoryStorage()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("data.pkl") else content)
    storage.write("model_world_size_1_rank_0.pt", [out.getbuffer()], durable=False)
    return storage


def tensor_of(kind: str, number: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Reduced:
    storage = Persistent(("storage", Global("torch", kind), number, "cpu", prod(shape)))
    hooks = Reduced(Global("collections", "OrderedDict"), ())
    return Reduced(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, strides, False, hooks))


def old_dtensor(package: str, spec_module: str, dtensor_module: str) -> bytes:
    """Return the pickle of a DTensor as torch 2.4 and 2.6 write it: the mesh has its ranks as a tensor."""
    mesh = {"device_type": "cpu", "mesh": tensor_of("IntStorage", "1", (1, 1), (1, 1)), "_coordinate_on_dim": [0, 0]}
    shard = New(Global(f"{package}.placement_types", "Shard"), (), {"dim": 0})
    replicate = New(Global(f"{package}.placement_types", "Replicate"))
    device_mesh = New(Global("torch.distributed.device_mesh", "DeviceMesh"), (), mesh)
    fields = {"mesh": device_mesh, "placements": (replicate, shard), "_hash": 7}
    spec = New(Global(f"{package}.{spec_module}", "DTensorSpec"), (), fields)
    kind, local = Global(dtensor_module, "DTensor"), tensor_of("FloatStorage", "0", (3, 2), (2, 1))
    arguments = (kind, Global("torch", "float32"), (3, 2), (2, 1), 0, None, None, False)
    state = (None, {"_local_tensor": local, "_spec": spec})
    wrapper = Global("torch._utils", "_rebuild_wrapper_subclass")
    made = Reduced(Global("torch._tensor", "_rebuild_from_type_v2"), (wrapper, kind, arguments, state))
    return write_pickle({"w": made}, protocol=2)


OLD, NEW = "torch.distributed._tensor", "torch.distributed.tensor"
FORMS = {"2.4": (OLD, "placement_types", f"{OLD}.api"), "2.6": (NEW, "_dtensor_spec", NEW)}


@pytest.mark.parametrize("form", FORMS)
def test_dtensors_of_older_torch_are_read(form: str) -> None:
    tensors = [numbered((3, 2)), torch.zeros(1, 1, dtype=torch.int32)]
    folder = with_pickle(archive(tensors), lambda _: old_dtensor(*FORMS[form]))
    assert torch.equal(st.load_plain_tensors(folder)["w"], tensors[0])


def test_another_rank_of_older_torch_is_seen_by_the_ranks_of_its_mesh() -> None:
    tensors = [numbered((3, 2)), torch.tensor([[5]], dtype=torch.int32)]
    folder = with_pickle(archive(tensors), lambda _: old_dtensor(*FORMS["2.4"]))
    with pytest.raises(CorruptCheckpoint, match=r"found rank 5.s part"):
        st.open_checkpoint(folder)


def test_sharded_tensors_of_fsdp1_are_named() -> None:
    made = Reduced(Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"), ())
    folder = with_pickle(archive([]), lambda _: write_pickle({"w": made}, protocol=2))
    with pytest.raises(UnsupportedValue, match=r"a torch.distributed ShardedTensor, as FSDP1 saves, cannot be read"):
        st.open_checkpoint(folder)


def test_what_is_no_tensor_is_common_state_its_own_tensors_too() -> None:
    extra = {"amax": torch.arange(3.0), "recipe": "delayed"}
    model = folder_of([{"w": torch.ones(2), "layer._extra_state": extra} for _ in range(2)])
    found = st.load_common_state_dict(model)["model"]["layer._extra_state"]
    assert torch.equal(found["amax"], extra["amax"]) and found["recipe"] == "delayed"
    assert list(st.load_plain_tensors(model)) == ["w"]
    copy = MemoryStorage()
    st.convert(model, copy, backend=("safetensors", 1))
    copied = st.load_common_state_dict(copy)["model"]["layer._extra_state"]
    assert torch.equal(copied["amax"], extra["amax"])
    state = {"w": {"exp_avg": torch.ones(2), "step": 3, "kind": "rows", "frozen": True}}
    optimizer = folder_of([{"state": state, "param_groups": [{"lr": 0.1, "params": ["w"]}]}], "optim")
    common = st.load_common_state_dict(optimizer)["optimizer"]
    assert common["state"] == {"optimizer.state.kind.w": "rows", "optimizer.state.frozen.w": True}
    assert sorted(st.load_plain_tensors(optimizer)) == ["optimizer.state.exp_avg.w", "optimizer.state.step.w"]
