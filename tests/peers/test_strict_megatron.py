"""The eight strict modes beside Megatron-Core's own `load`: what is loaded, returned, logged and raised."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("one_process"), pytest.mark.filterwarnings("ignore")]
validation = pytest.importorskip("megatron.core.dist_checkpointing.validation")
megatron = pytest.importorskip("megatron.core.dist_checkpointing")
from shardtree.interop.megatron import to_megatron  # noqa: E402

STORED = ("t1", "t2", "o1", "o2")
ASKED = {
    "nothing wrong": STORED,
    "a tensor is missing": ("t1", "o1", "o2"),
    "an object is missing": ("t1", "t2", "o1"),
    "a tensor is unexpected": (*STORED, "t9"),
    "an object is unexpected": (*STORED, "o9"),
    "both": ("t1", "t9", "o1", "o9"),
    "nothing is asked for": (),
}
ASSUME = st.StrictHandling.ASSUME_OK_UNEXPECTED
Load = Callable[[dict[str, Any], Path, str], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strict") / "saved"
    folder.mkdir()
    st.save({key: leaf(key, 7) for key in STORED} | {"step": 1}, folder, ("torch_dist", 1))
    return folder


def leaf(key: str, value: int = 0) -> Any:
    if key.startswith("t"):
        return st.ShardedTensor.from_rank_offsets(key, torch.full((2,), value))
    return st.ShardedObject(key, [key, value], (1,), (0,))


def theirs(target: dict[str, Any], folder: Path, strict: str) -> Any:
    return megatron.load(to_megatron(target), str(folder), strict=strict)


def ours(target: dict[str, Any], folder: Path, strict: str) -> Any:
    return st.load(target, folder, strict=strict, options=st.LoadOptions(allow_pickle=True))


def outcome(load: Load, asked: tuple[str, ...], folder: Path, strict: str, caplog: Any) -> Any:
    """Return what is loaded and returned, and the keys of what is logged; or that it raised, and of which keys."""
    caplog.clear()
    errors = (CheckpointingException, validation.CheckpointingException)
    if load is theirs:  # what their torch raises for a key that isn't there
        errors += (torch.distributed.checkpoint.CheckpointException, KeyError)  # type: ignore[assignment]
    try:
        found = load({key: leaf(key) for key in asked}, folder, strict)
    except errors as error:
        # Without a look beforehand, the format's own error names the first key that it lacks.
        return "raised", named(str(error)) if strict != ASSUME.value else set()
    tree, *keys = found if isinstance(found, tuple) else (found,)
    values = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in tree.items()}
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return values, keys, named(" ".join(said))


def named(text: str) -> set[str]:
    return {key for key in (*STORED, "t9", "o9") if f"'{key}'" in text}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("mode", list(st.StrictHandling), ids=lambda mode: mode.value)
def test_each_mode_does_what_megatrons_does(
    mode: st.StrictHandling, asked: tuple[str, ...], folder: Path, caplog: Any
) -> None:
    found = [outcome(load, asked, folder, mode.value, caplog) for load in (ours, theirs)]
    assert found[0] == found[1]


def test_the_table_catches_one_mode_taken_for_another(folder: Path, caplog: Any) -> None:
    asked, modes = ASKED["both"], list(st.StrictHandling)
    found = [outcome(theirs, asked, folder, mode.value, caplog) for mode in modes]
    for mode in modes:
        same = [
            each.value
            for each, other in zip(modes, found, strict=True)
            if outcome(ours, asked, folder, mode.value, caplog) == other
        ]
        assert same == [mode.value]


def test_missing_is_what_no_rank_asks_for(folder: Path) -> None:
    """Their function, given what all ranks ask for; our load on as many ranks."""
    asked = [("t1", "o9"), ("t2", "o1"), ()]
    metadata = [[to_megatron([leaf(key)])[0] for key in keys] for keys in asked]
    stored = {key: to_megatron([leaf(key)])[0] for key in STORED}
    mode = validation.StrictHandling.RETURN_ALL
    expected = [
        validation.validate_integrity_and_strict_load(
            {each.key: each for each in held}, mode, False, held, metadata, stored
        )
        for held in metadata
    ]

    def on_rank(world: st.World) -> Any:
        target = {key: leaf(key) for key in asked[world.rank]}
        return st.load(
            target,
            folder,
            strict="return_all",
            world=world,
            options=st.LoadOptions(allow_pickle=True),
            validate_access_integrity=False,
        )

    for (kept, *keys), (tree, *found) in zip(expected, st.simulate(3, on_rank), strict=True):
        assert found == keys
        assert set(tree) == {*kept, "step"}
