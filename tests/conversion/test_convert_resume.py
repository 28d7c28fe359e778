"""A conversion that dies at any step is gone on with by the same call, and never leaves half a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.conversion import ConversionReport, _convert, convert
from shardtree.errors import AlreadyACheckpoint, IntegrityError, StorageError
from shardtree.inspection._comparison import compare
from shardtree.storage import MemoryStorage
from shardtree.testing import Call, watched
from tests.options import convert_keywords
from tests.shell.checkpoint.parts import Killed, files

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"

TREE = {
    "w": [st.ShardedTensor.from_rank_offsets(f"w{n}", torch.arange(64).view(8, 8) + n) for n in range(3)],
    "rng": st.ShardedObject("rng", {"seed": 1}, (1,), (0,)),
    "step": 7,
}


def saved(tree: Any = TREE) -> MemoryStorage:
    folder = MemoryStorage()
    st.save(tree, folder)
    return folder


def run(source: Any, folder: Any, **options: Any) -> ConversionReport:
    return convert(
        source, folder, **convert_keywords(**{"backend": "safetensors", "max_bytes_in_flight": 600, **options})
    )


SOURCE = saved()


def test_a_kill_while_the_journal_is_removed_leaves_a_finished_checkpoint() -> None:
    folder, removed = MemoryStorage(), list[str]()

    def before(call: Call) -> None:
        if call.method == "remove" and ".convert" in call.name:
            removed.append(call.name)
        if len(removed) == 2:
            raise Killed

    with pytest.raises(Killed):
        run(SOURCE, watched(folder, before=before))
    assert not compare(SOURCE, folder)


def killed_after(batches: int, **options: Any) -> MemoryStorage:
    """Return the folder of a conversion that was killed when so many batches were done."""
    folder, done = MemoryStorage(), list[str]()

    def after(call: Call) -> None:
        done.extend([call.name] if call.name.endswith(".done") and call.method == "replace" else [])
        if len(done) == batches:
            raise Killed

    with pytest.raises(Killed):
        run(SOURCE, watched(folder, after=after), **options)
    return folder


@pytest.mark.parametrize(
    "transform",
    [
        lambda tree: st.rename(tree, {"w0": "w1", "w1": "w0"}),
        lambda tree: {**tree, "w0": replace_data(tree["w0"], tree["w0"].data.T)},
        lambda tree: {**tree, "w0": replace_data(tree["w0"], tree["w0"].data.read() + 1)},
    ],
    ids=["swapped", "transposed", "computed"],
)
def test_other_elements_under_the_same_keys_start_anew(transform: Callable[[Any], Any]) -> None:
    folder = killed_after(3)
    assert run(SOURCE, folder, transform=transform).resumed == 0


def replace_data(shard: st.ShardedTensor, data: Any) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(shard.key, data)


def test_another_source_or_format_option_starts_anew() -> None:
    folder = killed_after(3)
    assert run(saved(), folder).resumed == 0
    folder = killed_after(3)
    assert run(SOURCE, folder, allow_pickle=True).resumed == 0


def test_a_batch_whose_files_are_not_as_long_as_they_were_is_written_again() -> None:
    folder = killed_after(3)
    names = [name for name in files(folder) if "-of-" in name]
    folder.remove(names[1])
    folder.write(names[2], [memoryview(b"short")], durable=False)
    assert run(SOURCE, folder).resumed == 1
    assert not compare(SOURCE, folder)


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_journal_means_that_the_batch_is_written_again(damage: bytes | None) -> None:
    folder = killed_after(3)
    for name in [name for name in files(folder) if name.endswith(".done")][:2]:
        data = bytearray(folder.read(name))
        data[-1] ^= 0xFF
        folder.write(name, [memoryview(data if damage is None else damage)], durable=False)
    assert run(SOURCE, folder).resumed in ((1,) if damage is not None else (1, 2, 3))
    assert not compare(SOURCE, folder)


def test_bytes_that_changed_while_nobody_looked_are_noticed_at_the_end() -> None:
    folder = killed_after(4)
    name = [name for name in files(folder) if "-of-" in name][-1]
    data = bytearray(folder.read(name))
    data[-1] ^= 0xFF
    folder.write(name, [memoryview(data)], durable=False)
    with pytest.raises(st.CheckpointingException):
        run(SOURCE, folder)


def test_the_same_conversion_in_progress_is_not_gone_on_with() -> None:
    folder, refused = MemoryStorage(), list[Exception]()

    def before(call: Call) -> None:
        if call.method == "write" and not refused:
            with pytest.raises(StorageError, match="the same conversion to 'memory:' is in progress") as caught:
                run(SOURCE, folder)
            refused.append(caught.value)

    run(SOURCE, watched(folder, before=before))
    assert refused and not compare(SOURCE, folder)


def test_a_call_that_looked_before_the_same_conversion_began_leaves_it_its_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, place, rehearse = MemoryStorage(), MemoryStorage(), _convert.rehearse_common
    st.save(
        {f"w{n}": st.ShardedTensor.from_rank_offsets(f"w{n}", torch.full((64,), float(n))) for n in range(4)}, source
    )

    def first_batch_then_killed(call: Call) -> None:
        if call.name.endswith("000001.done"):
            raise Killed

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(_convert, "rehearse_common", rehearse)
        with pytest.raises(Killed):
            run(source, watched(place, before=first_batch_then_killed), max_bytes_in_flight=256)
        return rehearse(*arguments)

    monkeypatch.setattr(_convert, "rehearse_common", meanwhile)
    with pytest.raises(StorageError, match=r"the same conversion to .* is in progress"):
        run(source, place, max_bytes_in_flight=256)
    assert run(source, place, max_bytes_in_flight=256).resumed
    assert not compare(source, place)


@pytest.mark.parametrize("backend", ["safetensors", "zarr"])
def test_files_of_another_conversion_in_progress_stay(backend: str) -> None:
    folder, other, writes = MemoryStorage(), saved({"w": TREE["w"], "step": 8}), list[Call]()

    def full(call: Call) -> None:
        if call.method.startswith("write"):
            raise StorageError("the disk is full")

    def before(call: Call) -> None:
        writes.append(call) if call.method.startswith("write") else None
        if len(writes) == 4:
            writes.append(call)
            with pytest.raises(StorageError, match=r"the disk is full|in progress"):
                run(other, watched(folder, before=full), backend=backend)

    run(SOURCE, watched(folder, before=before), backend=backend)
    assert len(writes) > 4 and not compare(SOURCE, folder)


def test_a_checkpoint_that_came_meanwhile_is_not_taken_for_ones_own() -> None:
    folder = killed_after(3)
    st.save([st.ShardedTensor.from_rank_offsets("other", torch.ones(2))], folder)
    with pytest.raises(IntegrityError, match="'w0' is missing"):
        run(SOURCE, folder, verify=False)
    with pytest.raises(AlreadyACheckpoint):
        run(SOURCE, folder)
    assert list(st.load_plain_tensors(folder)) == ["other"]


def peak(folder: Path, how: str) -> int:
    """Return how much memory a conversion of `source`, which is in a folder, takes at most."""
    places = [str(folder / name) for name in ("source", how, f"warm-{how}")]
    command = [sys.executable, str(SCRIPTS / "convert_memory.py"), *places, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout)


@pytest.mark.exhaustive
def test_memory_in_use_keeps_to_the_bound(tmp_path: Path) -> None:
    big = {f"w{n}": torch.randn(3, 1024, 2048) for n in range(4)}  # 100 MB, and rows of 8 KiB
    shards = [st.ShardedTensor.from_rank_offsets(key, data) for key, data in {**big, "small": torch.ones(3)}.items()]
    st.save(shards, tmp_path / "source", options=st.SaveOptions(durable=False))
    assert peak(tmp_path, "lazy") < 60_000_000
    assert peak(tmp_path, "read") > 100_000_000  # so the measure would show it
    halves = st.load_plain_tensors(tmp_path / "lazy")
    assert all(torch.equal(halves[key], data.bfloat16()) for key, data in big.items())
