"""Conversions to every format that can be written, killed at every step and gone on with, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.conversion import convert
from shardtree.errors import IntegrityError
from shardtree.inspection._comparison import CheckpointDifference, compare
from shardtree.shell.table import formats_with
from shardtree.shell.table.index import IndexMetadata
from shardtree.storage import LocalStorage, MemoryStorage
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import Call, watched
from tests.faults.sampling import EXHAUSTIVE, sample
from tests.shell.checkpoint.parts import Killed, files

BACKENDS = sorted(formats_with(StrategyAction.SAVE_SHARDED))

SOME_BACKENDS = [pytest.param(each, marks=() if each in sample(BACKENDS, 2) else EXHAUSTIVE) for each in BACKENDS]
NATIVE = ("safetensors", 1)
HOLDS_TENSORS_ONLY = {"huggingface"}
CHANGES = {"write", "write_parts", "replace", "move", "make_folder", "remove", "remove_folder", "sync_folder"}

TREE = {
    "w": st.ShardedTensor.from_rank_offsets("w0", torch.arange(60.0).reshape(10, 6)),
    "b": st.ShardedTensor.from_rank_offsets("b", torch.arange(5).bfloat16()),
    "rng": st.ShardedObject("rng", {"seed": 1}, (1,), (0,)),
    "step": 7,
    "betas": (0.9, 0.95),
}


FIXTURES = Path(__file__).parents[1] / "fixtures"
WRITTEN_ELSEWHERE = sorted(folder.name for folder in FIXTURES.iterdir() if folder.is_dir() and folder.name[0] != "_")


@cache
def source() -> MemoryStorage:
    folder = MemoryStorage()
    st.save(TREE, folder)
    return folder


def run(backend: tuple[str, int], folder: Any) -> Any:
    leave_out = ["rng", "common"] if backend[0] in HOLDS_TENSORS_ONLY else []
    return convert(source(), folder, backend=backend, leave_out=leave_out, max_bytes_in_flight=150)


def check_equal(backend: tuple[str, int], folder: Any) -> None:
    found = compare(source(), folder)
    if backend[0] in HOLDS_TENSORS_ONLY:
        assert found.only_left == ("rng/shard_0_1",)
        assert not (found.only_right or found.kinds or found.values)
    else:
        assert found == CheckpointDifference(nbytes=found.nbytes)
    assert found.nbytes == 250


@cache
def steps(backend: tuple[str, int]) -> list[Call]:
    calls: list[Call] = []
    run(backend, watched(MemoryStorage(), after=calls.append))
    removal = next(call.number for call in calls if call.method == "remove" and ".convert" in call.name)
    return [call for call in calls if call.method in CHANGES and 0 < call.number <= removal]


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_there_and_back_is_the_same(backend: tuple[str, int], tmp_path: Path) -> None:
    report = run(backend, tmp_path / "there")
    assert report.verified_nbytes == 250 and report.batches >= 2
    check_equal(backend, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", backend="safetensors")
    check_equal(backend, tmp_path / "back")


ROOTS = {
    "list": [TREE["w"], TREE["b"]],
    "tuple": (TREE["w"], TREE["b"]),
    "nested": ([{"w": TREE["w"]}, ()], {"b": [TREE["b"]]}),
    "empty containers": {"model": TREE["w"], "none here": [], "nor here": {"a": ()}},
    "nothing": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_what_shards_leave_of_any_root_is_no_difference(root: Any, backend: tuple[str, int]) -> None:
    start, there, back = MemoryStorage(), MemoryStorage(), MemoryStorage()
    st.save(root, start)
    convert(start, there, backend=backend)
    convert(there, back, backend="safetensors")
    assert not compare(start, back).values and [*st.open_checkpoint(back)] == [*st.open_checkpoint(start)]


@pytest.mark.parametrize("root", [[TREE["w"], 7], (7, [TREE["w"]]), {"w": TREE["w"], "a": [[], 7]}])
@pytest.mark.parametrize("lost", [[], {}, [[], [8]]])
def test_values_beside_the_shards_of_any_root_are_compared(root: Any, lost: Any) -> None:
    row, start = (StrategyAction.SAVE_COMMON, "safetensors", 1), MemoryStorage()
    st.save(root, start)
    strategies = default_strategies | {row: lambda pending, common: default_strategies[row](pending, lost)}
    with pytest.raises(IntegrityError, match="the common state differs at data"):
        convert(start, MemoryStorage(), backend="safetensors", strategies=strategies)


@cache
def complete(backend: tuple[str, int]) -> list[str]:
    """Return the names of the files that a conversion writes."""
    folder = MemoryStorage()
    run(backend, folder)
    return names(folder)


def check_killed(backend: tuple[str, int], step: Call, resume: Callable[..., Any] = run) -> None:
    """Raise unless a conversion that is killed at a call can be gone on with, and what was done isn't done again."""
    folder, done, again = MemoryStorage(), list[Call](), list[Call]()

    def before(call: Call) -> None:
        if call.number == step.number:
            raise Killed

    with pytest.raises(Killed):
        run(backend, watched(folder, before=before, after=done.append))
    if st.is_checkpoint(folder):
        check_equal(backend, folder)
    report = resume(backend, watched(folder, after=again.append))
    finished = [call for call in done if call.method == "replace" and call.name.endswith(".done")]
    written = [call for call in again if call.method == "write" and "-of-" in call.name]
    assert report.resumed == len(finished), f"{report.resumed} batches were gone on with, {len(finished)} were done"
    assert report.verified_nbytes == report.nbytes
    assert backend != NATIVE or len(written) == report.batches - report.resumed
    check_equal(backend, folder)
    assert names(folder) == complete(backend), f"killed at {step}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", SOME_BACKENDS, ids=str)
def test_one_that_was_killed_is_gone_on_with_in_every_format(backend: tuple[str, int]) -> None:
    for step in steps(backend):
        check_killed(backend, step)


@pytest.mark.slow
@pytest.mark.parametrize("step", steps(NATIVE), ids=lambda step: f"{step.number}-{step.method}")
def test_a_killed_conversion_is_gone_on_with(step: Call) -> None:
    check_killed(NATIVE, step)


def test_the_law_catches_a_conversion_that_begins_anew() -> None:
    def anew(backend: tuple[str, int], folder: Any) -> Any:
        for name in [name for name in files(folder) if name.endswith(".done")]:
            folder.inner.remove(name)
        return run(backend, folder)

    index = next(step for step in steps(NATIVE) if "index-0" in step.name)
    with pytest.raises(AssertionError, match=r"0 batches were gone on with, \d+ were done"):
        check_killed(NATIVE, index, anew)


def names(folder: Any) -> list[str]:
    """Return the names of all files, without those of saves, which differ."""
    return sorted(file[file.index("/") :] if file.startswith("save-") else file for file in files(folder))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_changed_plan_removes_what_was_left(backend: tuple[str, int], tmp_path: Path) -> None:
    def before(call: Call) -> None:
        if call.method == "replace" and call.name.endswith("000001.done"):
            raise Killed

    folder = LocalStorage(str(tmp_path / "there"))
    with pytest.raises(Killed):
        run(backend, watched(folder, before=before))
    leave_out = ["rng", "b", "common"]
    convert(source(), folder, backend=backend, leave_out=leave_out)
    alone = LocalStorage(str(tmp_path / "alone"))
    convert(source(), alone, backend=backend, leave_out=leave_out)
    assert names(folder) == names(alone)
    assert len(list((tmp_path / "there").rglob("*"))) == len(list((tmp_path / "alone").rglob("*")))


@cache
def read_elsewhere(name: str) -> tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what a fixture holds: its objects' keys, its tensors, and those of its common state."""
    where = FIXTURES / name
    objects = [item.key for item in st.open_checkpoint(where).metadata.values() if is_object(item)]
    told = st.LoadOptions(shapes=_unproven_shapes(name))
    pairs = st.trees.leaves_with_paths(st.load_common_state_dict(where))
    common = {st.core.trees.path_key(path): leaf for path, leaf in pairs if isinstance(leaf, torch.Tensor)}
    return objects, dict(st.load_plain_tensors(where, options=told)), common


def _unproven_shapes(name: str) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes that a format's files don't prove, as `LoadOptions` takes them; None where files do."""
    if not name.startswith("transformers_parts"):
        return None
    return {key: shard.global_shape for key, shard in st.open_checkpoint(FIXTURES / name).metadata.items()}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("name", WRITTEN_ELSEWHERE)
def test_what_other_programs_wrote_converts_to_every_format(name: str, backend: tuple[str, int]) -> None:
    objects, source, common = read_elsewhere(name)
    leave_out = [*objects, "common"] if backend[0] in HOLDS_TENSORS_ONLY else []
    folder = MemoryStorage()
    at_once = max(4096, sum(tensor.nbytes for tensor in source.values()) // 8)  # so that there are several batches
    told = st.LoadOptions(shapes=_unproven_shapes(name))
    report = convert(
        FIXTURES / name,
        folder,
        backend=backend,
        leave_out=leave_out,
        max_bytes_in_flight=at_once,
        load_options=told,
    )
    assert report.verified_nbytes == report.nbytes > 0
    made = st.load_plain_tensors(folder)
    if "common" in leave_out:  # its tensors aren't
        source = source | common
    assert made.keys() == source.keys()
    for key, whole in made.items():
        assert torch.equal(whole, source[key]), key


@pytest.mark.parametrize("backend", [("safetensors", 1), ("torch_dist", 1)], ids=str)
def test_flat_optimizer_shards_become_boxes(backend: tuple[str, int]) -> None:
    source = FIXTURES / "megatron_0140_torch_dist_flat"
    folder = MemoryStorage()
    convert(source, folder, backend=backend)
    flat, boxes = (st.open_checkpoint(place).metadata for place in (source, folder))
    assert isinstance(flat, IndexMetadata) and (flat.index.chunk_start >= 0).any()
    assert isinstance(boxes, IndexMetadata) and (boxes.index.chunk_start == -1).all()


def is_object(item: Any) -> bool:
    return isinstance(item, st.ShardedObject)
