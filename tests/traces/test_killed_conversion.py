"""A conversion through a trace that was killed is gone on with by the same trace, in any process, and by no other."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import IntegrityError
from shardtree.storage import MemoryStorage
from shardtree.testing import Call, watched
from shardtree.traces import _local
from tests.quick_python.command import quick_python
from tests.traces.fused_weights import SOURCE, WEIGHTS, Tensors, fused, identity, traced


class Killed(BaseException):
    """What no handler of a conversion catches."""


def run(storage: Any, found: st.Trace) -> int:
    return st.convert(SOURCE, storage, backend="safetensors", transform=found, max_bytes_in_flight=300).resumed


def check(folder: Any, **changes: Any) -> None:
    loaded = st.load_plain_tensors(folder)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in fused(WEIGHTS, **changes).items())


def calls() -> list[Call]:
    made: list[Call] = []
    run(watched(MemoryStorage(), after=made.append), traced())
    return made


CALLS = calls()
DONE = [call.number for call in CALLS if call.method == "replace" and call.name.endswith(".done")]
STEPS = [
    call.number for call in CALLS if call.method in ("write", "replace", "make_folder") and call.number <= DONE[-1]
]


def killed(number: int) -> MemoryStorage:
    folder = MemoryStorage()

    def dies(call: Call) -> None:
        if call.number == number:
            raise Killed

    with pytest.raises(Killed):
        run(watched(folder, before=dies), traced())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", STEPS)
def test_it_is_gone_on_with_wherever_it_was_killed(number: int) -> None:
    folder = killed(number)
    # Traced anew: by what it does, not by the object, a trace is known.
    assert run(folder, traced()) == sum(done < number for done in DONE)
    check(folder)


CHANGES: dict[str, dict[str, Any]] = {
    "keys and values swapped": {"order": "qvk"},
    "another factor": {"factor": 0.25},
    "another constant": {"bias": 2.0},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_trace_s_half_is_not(name: str) -> None:
    folder = killed(DONE[-1])
    assert run(folder, traced(**CHANGES[name])) == 0
    check(folder, **CHANGES[name])


def test_other_code_that_makes_the_same_moves_goes_on() -> None:
    def by_slices(given: Tensors) -> dict[str, torch.Tensor]:
        qkv = torch.empty(24, 6)
        for place, name in enumerate("qkv"):
            qkv[8 * place : 8 * place + 8].copy_(given[name])
        return {**fused(given), "qkv": qkv}

    folder, found = killed(DONE[-1]), st.trace(by_slices, WEIGHTS)
    assert found == traced()
    assert run(folder, found) == len(DONE) - 1
    check(folder)


def test_a_trace_has_the_same_identity_in_another_process() -> None:
    code = "from tests.traces.fused_weights import identity, traced; print(identity(traced()))"
    # That process has another seed for the hashes of its texts.
    done = subprocess.run([*quick_python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == identity(traced())


def test_the_law_of_identity_catches_moves_that_are_known_by_their_places_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_local, "_description", lambda moves: [str(move[1:4]) for move in moves])
    with pytest.raises(IntegrityError, match="the destination differs from what was to be written"):
        run(killed(DONE[-1]), traced(order="qvk"))
