"""The checkpoint of four ranks that most tests of commands read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.checkpoints import save_training_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-100"
    save_training_state(folder)
    return folder
