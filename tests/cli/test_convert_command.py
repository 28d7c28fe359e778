"""`shardtree convert`: what it writes, what it says, and that it goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardtree as st
from shardtree import SaveOptions
from shardtree.checkpoint import convert
from tests.cli.checkpoints import document, run


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["safetensors", "safetensors:1", "zarr:3"])
def test_a_converted_checkpoint_equals_its_source(folder: Path, tmp_path: Path, backend: str) -> None:
    done = run("convert", folder, tmp_path / "b", "--to", backend)
    assert (done.exit_code, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"✓ {tmp_path / 'b'}: 5 tensors, 644 B, 4 objects, in ")
    assert second == "  read back and compared, by fingerprint"
    assert run("diff", folder, tmp_path / "b").exit_code == 0
    found = document("inspect", tmp_path / "b")["format"]
    assert found["sharded_backend"] == backend.partition(":")[0]


def test_the_common_state_may_go_to_another_format(folder: Path, tmp_path: Path) -> None:
    refused = run("convert", folder, tmp_path / "hf", "--to", "huggingface")
    assert refused.exit_code == 2
    assert "tree['iteration']" in refused.stderr
    assert run("convert", folder, tmp_path / "hf", "--to", "huggingface", "--common-to", "safetensors:1").exit_code == 0
    assert run("diff", folder, tmp_path / "hf").exit_code == 0


def test_objects_that_a_format_lacks_are_named_as_they_are_left_out(folder: Path, tmp_path: Path) -> None:
    refused = run("convert", folder, tmp_path / "hf", "--to", "huggingface", "--leave-out", "common")
    assert refused.exit_code == 2
    assert refused.stderr.endswith("--leave-out rng converts without these objects\n")
    words = ["--leave-out", "common", "--leave-out", "rng"]
    assert run("convert", folder, tmp_path / "hf", "--to", "huggingface", *words).exit_code == 0


def test_many_objects_are_left_out_by_a_pattern(tmp_path: Path) -> None:
    st.save({f"x{number}": st.ShardedObject(f"x{number}", number, (1,), (0,)) for number in range(9)}, tmp_path / "a")
    refused = run("convert", tmp_path / "a", tmp_path / "b", "--to", "huggingface", "--leave-out", "common")
    assert refused.stderr.endswith("--leave-out PATTERN converts without these objects\n")


def test_files_of_a_model_have_the_size_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    words = ["--to", "huggingface", "--leave-out", "common", "--leave-out", "rng"]
    run("convert", folder, tmp_path / "b", *words, "--max-file-size", "300")
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert len(names) > 2 and names[-1] == "model.safetensors.index.json"
    assert set(st.load_plain_tensors(tmp_path / "b")) == set(st.load_plain_tensors(folder))


def test_json_has_these_names(folder: Path, tmp_path: Path) -> None:
    found = document("convert", folder, tmp_path / "b", "--to", "safetensors", "--max-bytes-in-flight", "200")
    assert found == {
        "destination": str(tmp_path / "b"),
        "tensors": 5,
        "objects": 4,
        "bytes": 644,
        "left_out": [],
        "unused": [],
        "batches": found["batches"],
        "resumed": 0,
        "verified_bytes": 644,
        "fingerprints": {key: f"{number:016x}" for key, number in st.fingerprint(folder).items()},
    }
    assert found["batches"] > 3


def test_no_verify_reads_nothing_back(folder: Path, tmp_path: Path) -> None:
    done = run("convert", folder, tmp_path / "b", "--to", "safetensors", "--no-verify")
    assert done.exit_code == 0
    assert "not read back" in done.stdout
    assert run("diff", folder, tmp_path / "b").exit_code == 0


def test_the_same_command_goes_on_where_it_was_stopped(folder: Path, tmp_path: Path) -> None:
    written = 0

    def stop(count: int) -> None:
        nonlocal written
        written += count
        if written > 1500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(
            folder,
            tmp_path / "b",
            backend="safetensors",
            max_bytes_in_flight=100,
            save_options=SaveOptions(progress=stop),
        )
    assert run("inspect", tmp_path / "b").exit_code == 2
    done = run("convert", folder, tmp_path / "b", "--to", "safetensors", "--max-bytes-in-flight", "100")
    assert done.exit_code == 0
    assert "had been written by an earlier run" in done.stdout
    assert run("diff", folder, tmp_path / "b").exit_code == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--to", "punch-cards"], "no format 'punch-cards'"),
        (["--to", "safetensors", "--rename", "model.weight"], "OLD=NEW"),
        (["--to", "safetensors", "--rename", "step=a", "--rename", "step=b"], "OLD=NEW"),
        (["--to", "safetensors", "--rename", "nothing=x"], "'nothing'"),
        (["--to", "safetensors", "--rename", "model.bias=step"], "would become one"),
        (["--to", "safetensors", "--leave-out", "nothing"], "'nothing'"),
        (["--to", "safetensors", "--cast", "int8"], "floating-point"),
        (["--to", "safetensors", "--max-bytes-in-flight", "many"], "number of bytes"),
        (["--to", "safetensors", "--max-file-size", "2GB"], "--to huggingface"),
        ([], "--to"),
    ],
)
def test_what_cannot_be_done_has_status_2_and_writes_nothing(
    folder: Path, tmp_path: Path, words: list[str], complaint: str
) -> None:
    done = run("convert", folder, tmp_path / "b", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert list((tmp_path / "b").rglob("*")) == []


def test_pickled_values_are_converted_only_when_allowed(tmp_path: Path) -> None:
    st.save(
        {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "f": len},
        tmp_path / "a",
        options=st.SaveOptions(allow_pickle=True),
    )
    refused = run("convert", tmp_path / "a", tmp_path / "b", "--to", "safetensors")
    assert refused.exit_code == 2
    assert "Pass --allow-pickle if you trust its writer." in refused.stderr
    allowed = run("convert", tmp_path / "a", tmp_path / "b", "--to", "safetensors", "--allow-pickle")
    assert allowed.exit_code == 0
    assert allowed.stderr.startswith("warning: --allow-pickle")
