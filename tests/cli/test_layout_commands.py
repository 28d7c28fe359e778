"""`shardtree explain` and `shardtree plan`: layouts that are typed or stored, and what the library says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as draw

import shardtree as st
from shardtree.cli._layouts import mesh_layout
from tests.cli.checkpoints import document, run

TYPED = ("--mesh", "tp=2,dp=2", "--spec", "**.weight=tp,-")


@given(draw.dictionaries(draw.sampled_from("abcd"), draw.integers(1, 4), min_size=1))
def test_a_mesh_is_read_as_it_is_written(axes: dict[str, int]) -> None:
    layout = mesh_layout(",".join(f"{name}={size}" for name, size in axes.items()), [], None)
    assert layout is not None and layout.mesh == st.Mesh(**axes)


@pytest.mark.parametrize(
    ("mesh", "specs", "ranks", "message"),
    [
        ("tp", [], None, "is not a mesh"),
        ("tp=0", [], None, "is not a mesh"),
        ("tp=2,tp=2", [], None, "an axis twice"),
        (None, ["*=tp"], None, "specs need a mesh"),
        ("tp=2", [], 3, "leave out the mesh"),
        ("tp=2", ["w"], None, "is not PATTERN=SPEC"),
        ("tpp=2", ["*=tp"], None, r"no axis 'tp'. Did you mean 'tpp'\?"),
        ("tp=2", ["*=tp,tp"], None, "twice"),
    ],
)
def test_what_is_no_layout_is_told(mesh: str | None, specs: list[str], ranks: int | None, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        mesh_layout(mesh, specs, ranks)


def test_a_spec_may_join_axes_and_a_key_have_an_equals_sign() -> None:
    layout = mesh_layout("tp=2,dp=2", ["a=b=tp+dp,-"], None)
    assert layout is not None and layout.specs == (("a=b", st.PartitionSpec(("tp", "dp"), None)),)


def test_ranks_that_would_read_for_each_other_are_explained(folder: Path) -> None:
    words = ("explain", folder, "--mesh", "dp=2")
    wanted = document(*words)["total"]["bytes_wanted"]
    found = document(*words, "--exchange", "always")
    assert found["total"]["bytes_wanted"] * 2 == wanted
    for way in ("sent", "received"):
        assert sum(rank[way] for rank in found["ranks"]) == wanted // 2
    assert "received" in run(*words, "--exchange", "always").stdout


@pytest.mark.parametrize("words", [(), TYPED, ("--ranks", "3"), ("--like", "SELF"), ("--key", "model.weight")])
def test_a_load_in_another_layout_is_explained(folder: Path, words: tuple[str, ...]) -> None:
    words = tuple(str(folder) if word == "SELF" else word for word in words)
    found = document("explain", folder, *words)
    wanted = sum(rank["reads"]["bytes_wanted"] for rank in found["ranks"])
    assert (found["ok"], found["problems"], found["missing"]) == (True, [], [])
    assert wanted == found["total"]["bytes_wanted"] >= (512 if "--key" in words else 644)
    assert run("explain", folder, *words).stdout.startswith("✓ The target fits the checkpoint.\n")


def test_a_load_that_would_fail_has_status_1(folder: Path, tmp_path: Path) -> None:
    tree = {"w": st.ShardedTensor.from_rank_offsets("model.weigth", torch.ones(2))}
    st.save(tree, tmp_path)
    done = run("explain", folder, "--like", tmp_path)
    assert done.exit_code == 1 and "'model.weigth': not stored (did you mean 'model.weight'?)" in done.stdout
    assert document("explain", folder, "--like", tmp_path, status=1)["ok"] is False


def test_another_dtype_is_a_hint_in_the_shells_words(folder: Path, tmp_path: Path) -> None:
    tree = {"w": st.ShardedTensor.from_rank_offsets("model.weight", torch.ones(8, 16).bfloat16())}
    st.save(tree, tmp_path)
    done = run("plan", folder, tmp_path)
    assert done.exit_code == 2 and "Pass --cast to convert the source's dtype." in done.stderr
    assert run("plan", folder, tmp_path, "--cast").exit_code == 0


def test_a_plan_moves_what_the_library_says(folder: Path) -> None:
    found = document("plan", folder, *TYPED)
    plan = st.ReshardPlan.from_json(json.dumps(found["plan"]))
    assert (found["bytes_moved"], found["lower_bound"]) == (plan.bytes_moved, plan.lower_bound)
    assert [rank["gets"] for rank in found["ranks"]] == list(plan.received.values())
    assert run("plan", folder, *TYPED).stdout == f"{plan}\n"


def test_a_plan_between_two_stored_layouts_and_its_origins(folder: Path, tmp_path: Path) -> None:
    weight = torch.ones(8, 16)
    columns = st.shard({"model.weight": weight}, st.Mesh(tp=4), st.PartitionSpec(None, "tp"))
    st.simulate(4, lambda world: st.save(columns[world.rank], tmp_path, world=world))
    found = document("plan", folder, tmp_path)
    assert found["bytes_moved"] > 0 and found["bytes_moved"] + found["bytes_kept"] == weight.nbytes
    text = run("plan", folder, "--from-ranks", "2", "--ranks", "4", "--key", "**.weight", "--origins").stdout
    assert "'model.weight' (8, 16) float32: " in text and "rank 1" in text


def test_a_plan_needs_another_layout(folder: Path) -> None:
    done = run("plan", folder)
    assert done.exit_code == 2 and "give another checkpoint, or a layout" in done.stderr


def test_a_spec_that_cuts_nothing_is_an_error(folder: Path) -> None:
    done = run("explain", folder, "--mesh", "tp=2", "--spec", "modle.weight=tp", "--spec", "model.bias=-,tp")
    assert done.exit_code == 2
    assert "'modle.weight' (did you mean 'model.weight'?)" in done.stderr
    assert "'model.bias': a spec of 2 axes, but 'model.bias' has 1" in done.stderr
    assert "'model.bias'" in done.stderr
