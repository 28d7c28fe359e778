"""Folders and files of other programs are called theirs, with what reads them; no checkpoint of ours is, beside any."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import shardtree as st
from shardtree.errors import NotACheckpoint
from tests.cli.checkpoints import run
from tests.inspection.test_no_checkpoint import entry_points

ORBAX = "a checkpoint of Orbax (JAX), or a part of one"


def tree() -> dict[str, object]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}


def written(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# Orbax's own layouts, as orbax-checkpoint 0.12.8 wrote them: only names matter.


def orbax_arrays(folder: Path) -> Path:
    for name in ("_METADATA", "_sharding", "manifest.ocdbt", "d/0a1b", "array_metadatas/process_0"):
        written(folder / name)
    written(folder / "ocdbt.process_0" / "manifest.ocdbt")
    written(folder / "ocdbt.process_0" / "d" / "2c3d")
    return folder


def orbax_run(root: Path) -> Path:
    for step in (20, 100):
        written(root / str(step) / "_CHECKPOINT_METADATA")
        orbax_arrays(root / str(step) / "default")
    return root


def without_ocdbt(folder: Path) -> Path:
    for name in ("_METADATA", "w/.zarray", "w/0.0"):
        written(folder / name)
    return folder


def old_items(root: Path) -> Path:
    orbax_arrays(root / "7" / "state")
    return root


def torch_file(path: Path, *, zipped: bool) -> Path:
    torch.save({"step": 1}, path, _use_new_zipfile_serialization=zipped)
    return path


def npz(path: Path) -> Path:
    np.savez(path.with_suffix(".npz"), **{"model/w": np.ones(3)})
    return path.with_suffix(".npz").rename(path)


def tar(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        archive.add(written(path.parent / "model_config.yaml", b"{}"), "model_config.yaml")
    return path


def npy(path: Path) -> Path:
    np.save(path.with_suffix(".npy"), np.ones(3))
    return path.with_suffix(".npy").rename(path)


def nameless_safetensors(path: Path) -> Path:
    save_file({"w": np.ones(3)}, path)
    return path


PLACES: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "orbax": (orbax_arrays, ORBAX, "StandardCheckpointer().restore"),
    "orbax's process": (lambda path: orbax_arrays(path) / "ocdbt.process_0", ORBAX, "reads the folder with _METADATA"),
    "orbax without OCDBT": (without_ocdbt, ORBAX, "StandardCheckpointer().restore"),
    "orbax's step": (lambda path: orbax_run(path) / "20", ORBAX, "StandardCheckpointer().restore"),
    "orbax's run": (orbax_run, f"a run of another program; '100' in it is {ORBAX}", "StandardCheckpointer"),
    "orbax's old run": (old_items, f"a run of another program; '7/state' in it is {ORBAX}", "StandardCheckpointer"),
    "TensorFlow": (lambda path: written(path / "model.ckpt.data-00000-of-00001").parent, "TensorFlow", "tf.train"),
    "Flax": (lambda path: written(path / "flax_model.msgpack").parent, "weights of Flax", "msgpack_restore"),
    "ONNX": (lambda path: written(path / "m.onnx"), "a model in ONNX", "onnx.numpy_helper.to_array"),
    "NeMo": (lambda path: written(path / "m.nemo"), "a NeMo model", "model_weights"),
    "Keras": (lambda path: written(path / "m.keras"), "a model of Keras", "load_model"),
    "GGUF": (lambda path: written(path / "m.gguf"), "a model in llama.cpp's GGUF", "gguf_file="),
    # Known by their first bytes.
    "GGUF in a cache": (lambda path: written(path, b"GGUF\x03\0\0\0"), "a model in llama.cpp's GGUF", "gguf_file="),
    "HDF5": (lambda path: written(path, b"\x89HDF\r\n\x1a\n"), "arrays in HDF5", "h5py reads them"),
    "npz": (npz, "NumPy arrays", "safetensors.numpy.save_file(dict(numpy.load(file))"),
    "npy": (npy, "a NumPy array", "numpy.load"),
    "torch": (lambda path: torch_file(path, zipped=True), "pickled weights", "read it with torch.load"),
    "old torch": (lambda path: torch_file(path, zipped=False), "pickled weights", "read it with torch.load"),
    "tar": (tar, "a tar archive", "Unpack it"),
    "safetensors": (nameless_safetensors, "a safetensors file with another suffix", "ends in .safetensors"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_what_another_program_wrote_is_called_its_own(name: str, tmp_path: Path) -> None:
    make, state, fix = PLACES[name]
    place = make(tmp_path / "there")
    for call in entry_points(place, tmp_path / "new"):
        with pytest.raises(NotACheckpoint) as caught:
            call()
        assert state in str(caught.value) and fix in str(caught.value), str(caught.value)
    assert state in run("inspect", place).stderr
    assert not st.is_checkpoint(place) and not (tmp_path / "new").exists()
    assert st.CheckpointSeries(place.parent, "{}").steps() == ()


def test_the_first_bytes_are_looked_at_and_never_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'burst')!r}, 'w')",)

    for protocol in (2, 5):
        with pytest.raises(NotACheckpoint, match="pickled weights"):
            st.open_checkpoint(written(tmp_path / "blob", pickle.dumps(Bomb(), protocol)))
    for data in (b"", b"\0", b"PK\x03\x04", b"notes", bytes(range(256)) * 9):
        with pytest.raises(NotACheckpoint, match=r"a file in no format that is recognised"):
            st.open_checkpoint(written(tmp_path / "blob", data))
    assert not (tmp_path / "burst").exists()


def test_what_is_said_of_npz_makes_a_file_that_opens(tmp_path: Path) -> None:
    file = npz(tmp_path / "weights.npz")
    save_file(dict(np.load(file)), tmp_path / "model.safetensors")
    assert st.load_plain_tensors(tmp_path / "model.safetensors")["model/w"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "backend", [("safetensors", 1), ("torch_dist", 1), ("dcp", 1), ("zarr", 3), ("huggingface", 1)]
)
def test_no_checkpoint_of_ours_is_called_anothers(backend: tuple[str, int], tmp_path: Path) -> None:
    root = orbax_arrays(tmp_path / "step_1")
    for name in ("_CHECKPOINT_METADATA", "m.gguf", "w.npz", "m.nemo", "m.data-00000-of-00001", "blob.onnx"):
        written(root / name, b"GGUF")
    st.save(tree(), root, backend)
    assert st.is_checkpoint(root) and st.load(tree(), root)["w"].data.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [step.number for step in st.CheckpointSeries(tmp_path, "step_{}").steps()] == [1]


def test_a_run_of_ours_without_a_finished_step_stays_ours_beside_logs_of_arrays(tmp_path: Path) -> None:
    written(tmp_path / "iter_0000100" / "common.pt")
    written(tmp_path / "iter_0000020" / "common.pt")
    written(tmp_path / "iter_0000100" / "logs" / "losses.npy")
    written(tmp_path / "a" / "losses.npz")
    with pytest.raises(NotACheckpoint, match=r"a run without a finished step\n  Open 'iter_0000100' in it"):
        st.open_checkpoint(tmp_path)
