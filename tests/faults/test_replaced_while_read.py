"""A checkpoint that a save replaces while it is read is called replaced, never damaged, at whatever moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree import World
from shardtree.errors import CheckpointReplaced
from shardtree.inspection import _comparison
from shardtree.shell.storage._local_files import LocalReader
from shardtree.shell.table import _metadata
from tests.shell.checkpoint.parts import FORMATS


def tree(number: int) -> dict[str, Any]:
    w = torch.full((30_000 + number * 64,), float(number))
    whole = st.ShardedTensor.from_rank_offsets
    table = torch.full((3000,), number)
    return {"w": whole("w", w), "v": whole("v", -w), "o": st.ShardedObject("o", number, (1,), (0,)), "t": table}


def save(folder: Path, number: int, backend: tuple[str, int]) -> None:
    st.save(tree(number), folder, backend, overwrite=True, options=st.SaveOptions(durable=False))


def load(folder: Path) -> None:
    first = st.load({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(30_000)), "o": tree(0)["o"]}, folder)
    assert not first["w"].any() and not first["t"].any() and first["o"] == 0


def load_all(folder: Any) -> None:
    tensors = st.load_plain_tensors(folder)
    assert torch.equal(tensors["w"], -tensors["v"])


def verify(folder: Path) -> None:
    assert not st.verify(folder)


def open_and_read(folder: Path) -> None:
    opened = st.open_checkpoint(folder)
    assert torch.equal(opened["w"].data[5:9].read(), -opened["v"].data[5:9].read())


def load_halves(folder: Path) -> None:
    def half(world: World) -> None:
        part = st.ShardedTensor.from_rank_offsets("w", torch.zeros(15_000), (0, world.rank, 2))
        st.load({"w": part}, folder, world=world)

    st.simulate(2, half)


READS = [
    load,
    load_all,
    verify,
    open_and_read,
    st.fingerprint,
    lambda folder: st.explain({"w": tree(0)["w"]}, folder),
    load_halves,
]


def replaced_or_whole(
    read: Callable[[Path], Any],
    folder: Path,
    backend: tuple[str, int],
    save: Callable[[Path, int, tuple[str, int]], None] = save,
) -> int:
    """Read once for each file that is opened, with a save right before that; return how many reads were cut short."""
    enter, cut = LocalReader.__enter__, 0
    for moment in range(100):
        save(folder, 0, backend)
        count = 0

        def opened(reader: LocalReader, moment: int = moment) -> Any:
            nonlocal count
            count += 1
            if count == moment + 1:
                save(folder, 1, backend)  # the files that it reads itself come after this one
            return enter(reader)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalReader, "__enter__", opened)
            try:
                read(folder)
            except CheckpointReplaced:
                cut += 1
            except st.errors.ShapeError as error:
                # What was opened is the new checkpoint, which is of another shape.
                assert "target" in str(error), error
        if count <= moment:
            return cut
    raise AssertionError("more files than these checkpoints have")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:verify")
@pytest.mark.parametrize("backend", FORMATS, ids=lambda backend: backend[0])
@pytest.mark.parametrize(
    "read", READS, ids=["load", "load all", "verify", "open", "fingerprint", "explain", "two ranks"]
)
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_called_damaged(
    read: Callable[[Path], Any], backend: tuple[str, int], tmp_path: Path
) -> None:
    replaced_or_whole(read, tmp_path / "a", backend)


def save_alike(folder: Path, number: int, backend: tuple[str, int]) -> None:
    """Save tensors that are as long whatever the number: nothing but the files' times tells such checkpoints apart."""
    w = torch.full((800_000,), float(number + 1))
    pair = {key: st.ShardedTensor.from_rank_offsets(key, data) for key, data in {"w": w, "v": -w}.items()}
    st.save(pair, folder, backend, overwrite=True, options=st.SaveOptions(durable=False))


def convert(folder: Path) -> None:
    target, window = st.storage.MemoryStorage(), 1024 * 1024
    st.convert(folder, target, backend="safetensors", verify=False, max_bytes_in_flight=window)
    load_all(target)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [("dcp", 1), ("huggingface", 1)], ids=["dcp", "huggingface"])
def test_a_conversion_in_windows_never_mixes_two_checkpoints(
    backend: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replaced_or_whole(convert, tmp_path / "a", backend, save_alike) > 2
    monkeypatch.setattr(_comparison, "check_unreplaced", lambda checkpoint: None)
    with pytest.raises(AssertionError):
        replaced_or_whole(convert, tmp_path / "b", backend, save_alike)


def test_the_law_catches_a_read_that_accuses_the_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replaced_or_whole(verify, tmp_path / "a", ("dcp", 1)) > 0
    monkeypatch.setattr(_metadata, "_changed_files", lambda checkpoint: [])
    with pytest.raises((AssertionError, st.errors.CheckpointingException)):
        replaced_or_whole(verify, tmp_path / "b", ("dcp", 1))
