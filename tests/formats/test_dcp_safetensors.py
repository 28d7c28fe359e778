"""Ranks' parts in safetensors files, as transformers saves them: read in any layout, and never taken for more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

import shardtree as st
from shardtree.errors import CorruptCheckpoint, ShapeError, UnsupportedValue
from shardtree.storage import MemoryStorage
from shardtree.strategies import Damage, LoadOptions
from tests.cli.checkpoints import document, run
from tests.formats.optimizer_formats import FIXTURES, LAYOUTS, wrong_in_layout
from tests.shell.table import folders

NAMES = ("transformers_parts_1", "transformers_parts_fsdp2", "transformers_parts_tp2")
TRUTH = load_file(FIXTURES / "transformers_parts_truth.safetensors")
TOLD = LoadOptions(shapes={key: tensor.shape for key, tensor in TRUTH.items()})
FSDP = FIXTURES / "transformers_parts_fsdp2"
FIRST, SECOND = (f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2))
HEAD, ROWS = "lm_head.weight", torch.arange(70.0).view(10, 7)
NORM = "model.norm.weight"

Offsets = Mapping[str, Any]


def part(tensors: Mapping[str, torch.Tensor], offsets: Offsets | str, **texts: str) -> bytes:
    """Return a rank's file, as DCP's writer makes it."""
    places = offsets if isinstance(offsets, str) else json.dumps(offsets)
    return save(dict(tensors), metadata={"DCP_SHARDING_INFO": places, "DCP_VERSION": "1.0", "format": "pt"} | texts)


def rows(begin: int, end: int) -> bytes:
    return part({"w": ROWS[begin:end].clone()}, {"w": {"saved_offsets": [begin, 0]}})


def folder_of(*files: bytes) -> MemoryStorage:
    return folders.folder_of(
        {f"shard-{rank:05d}-model-00001-of-00001.safetensors": data for rank, data in enumerate(files, start=1)}
    )


def real_files(folder: Path = FSDP) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def target(shape: tuple[int, ...], **options: Any) -> dict[str, st.ShardedTensor]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(shape), **options)}


# What transformers saved


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_parts_load_in_any_layout(name: str, layout: str) -> None:
    assert wrong_in_layout(FIXTURES / name, TRUTH, layout) == []


@pytest.mark.parametrize("name", NAMES)
def test_told_shapes_make_a_whole_checkpoint_of_the_parts(name: str, tmp_path: Path) -> None:
    loaded = st.load_plain_tensors(FIXTURES / name, options=TOLD)
    assert loaded.keys() == TRUTH.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in TRUTH.items())
    st.convert(FIXTURES / name, tmp_path / "whole", backend="huggingface", load_options=TOLD)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(torch.equal(whole[key], tensor) for key, tensor in TRUTH.items())
    assert st.load_common_state_dict(FIXTURES / name) == {}


def test_parts_load_on_ranks_that_parse_once() -> None:
    storage = folder_of(rows(0, 4), rows(4, 8), rows(8, 10))

    def load(world: st.world.World) -> torch.Tensor:
        half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(5, 7), (0, world.rank, 2))
        return st.load({"w": half}, storage, world=world)["w"]

    assert torch.equal(torch.cat(st.simulate(2, load)), ROWS)


# What the format can't say


def test_a_missing_last_file_leaves_a_smaller_tensor_that_only_a_shape_tells() -> None:
    storage = folder_of(rows(0, 4))
    assert st.load_tensors_metadata(storage)["w"].global_shape == (4, 7)
    with pytest.raises(
        ShapeError, match=r"'w': stored \(4, 7\), target \(10, 7\): a rank's file may be missing"
    ) as told:
        st.load(target((10, 7)), storage)
    assert "allow_shape_mismatch" not in str(told.value)  # by which the missing rows would be lost in silence
    assert "stored (4, 7), target (10, 7)" in str(st.explain(target((10, 7)), storage))
    with pytest.raises(CorruptCheckpoint, match=r"'w': stored \(4, 7\), expected \(10, 7\)"):
        st.open_checkpoint(storage, options=LoadOptions(shapes={"w": (10, 7)}))
    with pytest.raises(CorruptCheckpoint, match="'v': not stored"):
        st.open_checkpoint(storage, options=LoadOptions(shapes={"w": (4, 7), "v": (2,)}))


def test_a_target_of_any_shape_proves_none() -> None:
    storage, padded = folder_of(rows(0, 4)), target((10, 7), allow_shape_mismatch=True)
    with pytest.raises(ShapeError, match="LoadOptions"):
        st.load(padded, storage)
    assert "takes any shape" in str(st.explain(padded, storage))
    loaded = st.load(padded, storage, options=LoadOptions(shapes={"w": (4, 7)}))
    assert torch.equal(loaded["w"][:4], ROWS[:4])


def test_what_reads_without_a_target_wants_to_be_told(tmp_path: Path) -> None:
    for read in (
        lambda: st.convert(FSDP, tmp_path / "out", backend="safetensors"),
        lambda: st.load_plain_tensors(FSDP),
        lambda: st.open_checkpoint(FSDP)[HEAD].data[:1].read(),
        lambda: st.save({HEAD: st.open_checkpoint(FSDP)[HEAD]}, tmp_path / "copy"),
    ):
        with pytest.raises(ShapeError, match=r"shapes=\.\.\."):
            read()
    some = LoadOptions(shapes={HEAD: (21, 10)})
    with pytest.raises(ShapeError, match=r"model\.embed_tokens\.weight") as caught:
        st.convert(FSDP, tmp_path / "out", backend="safetensors", load_options=some)
    assert HEAD not in str(caught.value)
    st.convert(FSDP, tmp_path / "out", backend="safetensors", load_options=some, leave_out=["model.**"])


def test_the_command_line_is_told_that_no_file_is_missing(tmp_path: Path) -> None:
    refused = run("convert", FSDP, tmp_path / "out", "--to", "hf")
    assert refused.exit_code == 2
    assert "Pass the saved shapes with --shapes stored" in refused.stderr
    assert run("convert", FSDP, tmp_path / "out", "--to", "hf", "--shapes", "stored").exit_code == 0
    assert st.load_plain_tensors(tmp_path / "out").keys() == TRUTH.keys()


def test_inspect_marks_shapes() -> None:
    done = run("inspect", FSDP)
    assert done.exit_code == 0
    assert "21 \N{MULTIPLICATION SIGN} 10 ?" in done.output
    assert "12 shapes, marked ?" in done.output
    assert not any(row["shape_proven"] for row in document("inspect", FSDP)["tensors"])


def test_verify_says_what_it_cannot(caplog: pytest.LogCaptureFixture) -> None:
    assert st.verify(FSDP) == ()
    assert "no checksums, shapes or count of files" in caplog.text
    (damage,) = st.verify(folder_of(rows(4, 10)))
    assert isinstance(damage, Damage)


# Overlaps, holes, several saves


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([rows(4, 10)], r"28 of 70 elements of shape \(10, 7\) are in no file"),
        ([rows(0, 4), rows(6, 10)], "14 of 70 elements"),
        ([rows(0, 6), rows(4, 10)], "parts overlap"),
        ([rows(0, 5), rows(0, 5), rows(5, 10)], "parts overlap"),
        ([rows(0, 4), rows(2, 4), rows(6, 10)], "parts overlap, and others are in no file"),
    ],
    ids=["first gone", "middle gone", "two saves", "twice", "both"],
)
def test_parts_that_make_no_whole_are_refused(files: list[bytes], words: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=words):
        st.load(target((10, 7)), folder_of(*files))


def test_a_missing_rank_of_a_real_save_is_named() -> None:
    files = real_files()
    del files[FIRST]
    with pytest.raises(CorruptCheckpoint, match=f"{HEAD}.*110 of 210 elements.*{SECOND}"):
        st.open_checkpoint(folders.folder_of(files))


def test_parts_of_different_saves_are_refused() -> None:
    other = part({"w": torch.zeros(6, 7, dtype=torch.bfloat16)}, {"w": {"saved_offsets": [4, 0]}})
    with pytest.raises(CorruptCheckpoint, match="the parts of tensor 'w' differ in dtype or number of axes"):
        st.open_checkpoint(folder_of(rows(0, 4), other))
    files = {FIRST: rows(0, 4), "shard-00001-model-00001-of-00002.safetensors": rows(4, 10)}
    with pytest.raises(CorruptCheckpoint, match=r"files named \*-of-00001 and files named \*-of-00002"):
        st.open_checkpoint(folders.folder_of(files))


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ("{}", r"'w': None"),
        ('{"w": {"saved_offsets": [0]}}', "of 2 axes"),
        ('{"w": {"saved_offsets": [0, -1]}}', "of 2 axes"),
        ('{"w": {"saved_offsets": [0, true]}}', "of 2 axes"),
        ('{"w": {"saved_offsets": {"0": 0}}}', "of 2 axes"),
        ('{"w": [0, 0]}', "of 2 axes"),
        ("[]", r"'w': None"),
        (f'{{"w": {{"saved_offsets": [{2**63 - 1}, 0]}}}}', "an end of"),
        (f'{{"w": {{"saved_offsets": [{2**62}, {2**62}]}}}}', "are in no file"),
        ("{", "DCP_SHARDING_INFO"),
    ],
)
def test_unsound_offsets_are_refused(offsets: str, words: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=words):
        st.open_checkpoint(folder_of(part({"w": ROWS}, offsets)))


def test_headers_that_are_no_parts_are_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="no DCP_SHARDING_INFO"):
        st.open_checkpoint(folder_of(save({"w": ROWS})))
    later = part({"w": ROWS}, {"w": {"saved_offsets": [0, 0]}}, DCP_VERSION="2.0")
    with pytest.raises(UnsupportedValue, match="unsupported version"):
        st.open_checkpoint(folder_of(later))
    with pytest.raises(CorruptCheckpoint, match="not a valid safetensors file"):
        st.open_checkpoint(folder_of(rows(0, 10)[:-1]))


def test_empty_parts_and_other_texts_are_read() -> None:
    none = part({"w": torch.zeros(0, 7)}, {"w": {"saved_offsets": [10, 0]}}, run="a")
    storage = folder_of(rows(0, 10), none)
    assert torch.equal(st.load(target((10, 7)), storage)["w"], ROWS)
    assert st.load_common_state_dict(storage) == {"__metadata__": {"run": "a"}}
    scalar = folder_of(part({"s": torch.tensor(3)}, {"s": {"saved_offsets": []}}))
    assert st.open_checkpoint(scalar)["s"].data.read() == 3


# Which format a folder is in


def test_a_whole_model_beside_the_parts_is_read_instead(tmp_path: Path) -> None:
    files = real_files()
    assert st.open_checkpoint(folders.folder_of(files)).checkpoint.fields["sharded_backend"] == "dcp_safetensors"
    whole = (FIXTURES / "transformers_parts_truth.safetensors").read_bytes()
    opened = st.open_checkpoint(folders.folder_of(files | {"model.safetensors": whole}))
    assert opened.checkpoint.fields["sharded_backend"] == "huggingface"
    beside = st.open_checkpoint(folders.folder_of(files | {"adapter_model.safetensors": save({"a": ROWS})}))
    assert beside.checkpoint.fields["sharded_backend"] == "dcp_safetensors"
    (tmp_path / SECOND).write_bytes(files[SECOND])
    assert st.is_checkpoint(tmp_path)
