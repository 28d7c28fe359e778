"""Checkpoints for the tests of the command line, and a runner of its commands."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner, Result

import shardtree as st
from shardtree.cli._app import app
from tests.quick_python.command import quick_python

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def document(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    """Return what a command prints as JSON."""
    done = run(*arguments, "--json")
    assert done.exit_code == status, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def process(*arguments: str | Path, shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process, where nothing is a terminal and warnings are errors."""
    command = [*quick_python(), "-W", "error", "-m", "shardtree", *map(str, arguments)]
    words = ["bash", "-c", f'set -o pipefail; "$@" {shell}', "bash", *command] if shell else command
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False, env={**_environment(), **environment}
    )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}


def training_state(rank: int) -> dict[str, Any]:
    """Return rank `rank`, of four, of a state with every kind of cut, sharded objects and common state."""
    rows = 3 if rank == 0 else 1
    uneven = torch.arange(rows * 2.0).reshape(rows, 2)
    return {
        "model": {
            "weight": st.ShardedTensor.from_rank_offsets(
                "model.weight", torch.full((4, 8), float(rank)), (0, rank % 2, 2), (1, rank // 2, 2)
            ),
            "bias": st.ShardedTensor.from_rank_offsets("model.bias", torch.ones(6).bfloat16(), replica_id=rank),
            "uneven": st.ShardedTensor(
                "model.uneven", uneven, torch.float32, (rows, 2), (6, 2), ((0, 3, 4, 5)[rank], 0), None
            ),
            "moment": st.ShardedTensor.from_rank_offsets_flat(
                "model.moment", torch.arange(4.0) + rank, (4, 4), flattened_range=slice(rank * 4, rank * 4 + 4)
            ),
        },
        "step": st.ShardedTensor.from_rank_offsets("step", torch.tensor(7), replica_id=rank),
        "rng": st.ShardedObject("rng", {"seed": rank}, (2, 2), (rank // 2, rank % 2)),
        "iteration": 42,
        "args": {"lr": 1e-3, "betas": (0.9, 0.95)},
    }


def save_training_state(folder: Path | str) -> None:
    """Save that state from four ranks."""
    content = {"optimizer": "adam"}
    st.simulate(4, lambda world: st.save(training_state(world.rank), folder, world=world, content_metadata=content))
