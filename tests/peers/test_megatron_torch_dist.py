"""Beside Megatron-Core: it loads what ranks save here as `torch_dist` in any layout, and ranks load what it saves."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.interop.megatron import from_megatron, to_megatron
from shardtree.testing import (
    GlobalState,
    Layout,
    check_roundtrip,
    even_layout,
    first_difference,
    random_bits,
    rank_tree,
    state_layouts,
    target_tree,
)
from shardtree.testing._states import check_loaded, ranks_of
from tests.peers.lens_state import STORED, lens_tree

megatron = pytest.importorskip("megatron.core.dist_checkpointing")
filesystem_async = pytest.importorskip("megatron.core.dist_checkpointing.strategies.filesystem_async")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool, torch.int64)
SHAPES = ((8, 12), (5, 3), (6,), (), (4, 2, 3), (2, 2))
STATE = GlobalState(
    {f"w.{n}": random_bits(shape, dtype, n) for n, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))},
    {"rng": [{"seed": 1000}, {"seed": 1001}, {"seed": 1002}]},
    {"args": Namespace(lr=0.1, name=None), "groups": [{"betas": (0.9, 0.95)}], "tensor": torch.arange(5), "empty": {}},
)
WHOLE = {key: even_layout(tuple(tensor.shape), 1) for key, tensor in STATE.tensors.items()}
CONTENT = {"distrib_optim_sharding_type": "fully_sharded_model_space", "version": 2}
some_examples = settings(max_examples=8)

Save = Callable[..., None]


@pytest.fixture(scope="module", autouse=True)
def _without_an_accelerator() -> Iterator[None]:
    """Without one it asks for one all the same, to wait for it and to say where a flag should live."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        # It would log that, and needs psutil for it.
        patch.setattr(filesystem_async, "_process_memory", lambda: 0, raising=False)
        yield


def zeros(target: Any) -> Any:
    return st.map_shards(lambda leaf: leaf.init_data("cpu") if isinstance(leaf, st.ShardedTensor) else leaf, target)


def without_local(tree: Any) -> Any:
    """Return a tree without its list of a local object, which they can't merge into what is stored of the list."""
    return {name: part for name, part in tree.items() if name != "local"}


def they_load(target: Any, folder: Path, *, world: st.World) -> Any:
    loaded = megatron.load(to_megatron(without_local(target)), str(folder))
    assert loaded.pop("content_metadata") == CONTENT
    return loaded | {"local": [7, world.rank]}


def we_save(tree: Any, folder: Path, *, world: st.World) -> None:
    st.save(without_local(tree), folder, ("torch_dist", 1), content_metadata=CONTENT, world=world)


def check_they_load(save: Save, layout: Mapping[str, Layout], folder: Path) -> None:
    check_roundtrip(STATE, layout, WHOLE, directory=folder, save=save, load=they_load, prepare_target=zeros)


@some_examples
@given(data=some.data())
def test_megatron_core_loads_what_ranks_save(data: some.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    layout = data.draw(state_layouts(STATE, data.draw(some.integers(1, 4))))
    check_they_load(we_save, layout, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    tree = without_local(rank_tree(STATE, WHOLE, 0))
    megatron.save(to_megatron(tree), str(folder), content_metadata=CONTENT)
    return folder


@some_examples
@given(data=some.data())
def test_ranks_load_what_megatron_core_saved(data: some.DataObject, theirs: Path) -> None:
    layout = data.draw(state_layouts(STATE, data.draw(some.integers(1, 4))))
    targets = [target_tree(STATE, layout, rank) for rank in range(ranks_of(layout))]

    def load(world: st.World) -> Any:
        loaded = st.load(without_local(targets[world.rank]), theirs, world=world)
        return loaded | {"local": [7, world.rank]}

    check_loaded(STATE, targets, st.simulate(len(targets), load))
    assert st.load_content_metadata(theirs) == CONTENT


def test_the_comparison_catches_a_flipped_bit(tmp_path: Path) -> None:
    def damaging(tree: Any, folder: Path, *, world: st.World) -> None:
        we_save(tree, folder, world=world)
        (file,) = folder.glob("*.distcp")
        data, whole = bytearray(file.read_bytes()), STATE.tensors["w.0"].numpy().tobytes()
        data[data.index(whole)] ^= 1
        file.write_bytes(data)

    with pytest.raises(AssertionError, match=r"'w\.0': 1 of 96 elements differ"):
        check_they_load(damaging, WHOLE, tmp_path)


def test_factories_of_lenses_and_of_their_optimizer_s_states_load_in_either(tmp_path: Path) -> None:
    megatron.save(lens_tree(), str(tmp_path))
    states = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    assert set(st.load_tensors_metadata(tmp_path)) == {state + key for state in states for key in STORED}
    theirs = megatron.load(lens_tree(zeros=True), str(tmp_path))
    ours = st.load(from_megatron(lens_tree(zeros=True)), tmp_path)
    for name, factory in lens_tree().items():
        assert (
            first_difference(theirs[name], factory.data) is None and first_difference(ours[name], factory.data) is None
        )
