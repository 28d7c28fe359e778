"""The world of a launcher's processes; tests/cli/test_convert_processes.py starts them."""

from __future__ import annotations

import pytest

from shardtree.errors import WorldError
from shardtree.live import launched_rank, launched_world


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    return monkeypatch


def test_processes_that_cannot_meet_are_an_error(launched: pytest.MonkeyPatch) -> None:
    assert launched_rank() == 1
    with pytest.raises(WorldError, match=r"WORLD_SIZE is 2, and the processes cannot connect"), launched_world(1.0):
        pass


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "1"), ("WORLD_SIZE", ""), ("RANK", "")])
def test_without_a_launcher_a_process_is_alone(launched: pytest.MonkeyPatch, name: str, value: str) -> None:
    launched.setenv(name, value)
    assert launched_rank() == 0
    with launched_world(1.0) as world:
        assert world.size == 1
