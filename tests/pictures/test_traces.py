"""Pictures of traces: rows of outputs are the rows of sources that they are said to be, and none is missing."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

import shardtree as st
from shardtree.errors import KeyMismatch
from shardtree.pictures import Flow, _flows
from shardtree.pictures._flows import trace_picture
from tests.traces import programs


def check_rows(seed: int) -> None:
    """Raise unless all rows are drawn, and the first element of each is where it is said to be from."""
    sources = programs.given(Random(seed))
    found = st.trace(programs.program(seed), sources)
    outputs = found(sources)
    for name, tensor in outputs.items():
        if name in found.tied or not tensor.numel():
            continue
        tensor = tensor.reshape(tensor.shape or (1,))
        axis, rows = _flows._along_best_axis(found, name)
        drawn = np.zeros(tensor.shape[axis], dtype=bool)
        for others, run in rows:
            drawn[run.start : run.start + run.rows] = True
            if run.target is None:
                continue
            key, own, elsewhere = run.target
            for number in range(run.rows):
                here = [each.low for each in others]
                there = [each.low for each in elsewhere]
                here.insert(axis, run.start + number)
                there.insert(own, run.to_start + number)
                assert tensor[tuple(here)] == sources[key].reshape(sources[key].shape or (1,))[tuple(there)]
        assert drawn.all()


@given(draw.integers(0, 10**6))
def test_rows_are_those_that_are_named(seed: int) -> None:
    check_rows(seed)


def test_the_law_catches_rows_that_are_one_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = _flows._spans

    def shifted(place: int, loops: object, shape: tuple[int, ...]) -> object:
        return spans(place + (place + 1 < np.prod(shape)), loops, shape)  # type: ignore[arg-type]

    monkeypatch.setattr(_flows, "_spans", shifted)
    with pytest.raises((AssertionError, IndexError)):
        _ = [check_rows(seed) for seed in range(50)]


def titles(drawing: object) -> list[str]:
    return [line for line in repr(drawing).split("\n") if " is " in line and "made" not in line]


def test_what_is_written_from_where_and_through_what_is_said() -> None:
    def load(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = torch.empty(6, 4)
        rows[1:5].copy_(given["k"])
        return {
            "w13": torch.stack(
                [torch.cat([given["0.gate"], given["0.up"]]), torch.cat([given["1.gate"], given["1.up"]])]
            ),
            "rows": rows,
            "scaled": given["k"] * given["s"].repeat_interleave(2, 0),
            "half": given["k"].bfloat16()[:, 2:],
            "zeros": torch.zeros(3),
        }

    experts = {f"{expert}.{name}": torch.empty(3, 4) for expert in range(2) for name in ("gate", "up")}
    found = st.trace(load, {**experts, "k": torch.empty(4, 4), "s": torch.empty(2, 1)})
    assert titles(st.draw(found)) == [
        "w13[0, 0:3, :] is 0.gate[0:3]",
        "w13[0, 3:6, :] is 0.up[0:3]",
        "w13[1, 0:3, :] is 1.gate[0:3]",
        "w13[1, 3:6, :] is 1.up[0:3]",
        "rows [0:1] is never written",
        "rows [1:5] is k[0:4]",
        "rows [5:6] is never written",
        "scaled [0:4] is k[0:4] in mul(k; s)",
        "half [0:4] is k[0:4, 2:4].to(bfloat16)",
        "zeros [0:3] is 0.0",
    ]
    assert titles(st.draw(found, "half")) == ["half [0:4] is k[0:4, 2:4].to(bfloat16)"]
    assert st.draw(found, "half").picture.title == "'half': bfloat16[4,2]"
    with pytest.raises(KeyMismatch, match="the trace has no output 'halve'"):
        st.draw(found, "halve")


def test_a_random_gather_of_many_rows_is_drawn_in_part() -> None:
    index = torch.randperm(5_000)
    found = st.trace(lambda given: {"w": given["w"][index]}, {"w": torch.empty(5_000, 2)})
    assert "more" in trace_picture(found).notes[0]


def test_of_many_outputs_some_are_drawn() -> None:
    given = {f"w{number}": torch.empty(2) for number in range(5000)}
    picture = trace_picture(st.trace(dict, given))
    (flow,) = picture.rows[0]
    assert isinstance(flow, Flow)
    assert (len(flow.blocks), len(flow.streams)) == (64, 64)
    assert picture.notes == ("And 4936 outputs more: draw(trace, name) draws one.",)
    assert trace_picture(st.trace(dict, {})).title == "0 sources, 0 outputs"
    assert st.draw(st.trace(dict, {})).svg()


def test_names_are_never_cut() -> None:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    given = {name: torch.empty(4, 3) for name in names}
    lines = repr(st.draw(st.trace(lambda given: {fused: torch.cat([given[name] for name in names])}, given))).split(
        "\n"
    )
    assert lines[2:8:2] == [f"{fused} [{4 * part}:{4 * part + 4}] is" for part in range(3)]
    assert lines[3:8:2] == [f"  {name}[0:4]" for name in names]
