"""What benchmarks measure with: turns, tries, peaks of memory, and curves."""

from __future__ import annotations

import mmap
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import imports, maps
from benchmarks._measuring import Action, Curve, Panel, in_turns, peak, plot, ratio
from benchmarks.roundtrip import is_enough

MIB = 1024 * 1024
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_rounds_take_the_fastest_try_in_another_order_each_time() -> None:
    order: list[str] = []
    seconds = in_turns({name: lambda name=name: order.append(name) for name in "abc"}, rounds=4, tries=2)
    assert {name: len(taken) for name, taken in seconds.items()} == dict.fromkeys("abc", 4)
    rounds = ["".join(order[first : first + 6 : 2]) for first in range(0, 24, 6)]
    assert len(set(rounds)) > 1 and all(sorted(one) == [*"abc"] for one in rounds)
    assert ratio({"a": [2.0, 9.0, 3.0], "b": [1.0, 1.0, 1.0]}, "a", "b") == 3.0


@pytest.mark.parametrize(
    ("seconds", "tries", "enough"),
    [
        ([], 3, False),
        ([0.3, 0.3], 3, False),
        ([0.3, 0.305, 0.31], 3, True),
        ([0.3, 1.2, 0.31], 3, False),
        ([0.3, 1.2, 0.31, 0.3], 3, True),
        ([1.2, 1.22, 0.31, 0.3], 3, False),
        ([0.3] + [1.2] * 11, 3, True),
        ([0.3, *[4.95] * 4], 3, True),
        ([0.3], 1, True),
        ([5.1], 3, True),
        ([4.9], 3, False),
    ],
)
def test_tries_end_when_the_three_fastest_agree(seconds: list[float], tries: int, enough: bool) -> None:
    assert is_enough(seconds, tries) == enough


def taking(nbytes: int, returned: int, rank: int, ranks: int) -> Action:
    def action() -> int:
        for _ in range(30):  # it is looked at now and then, on a busy machine seldom
            torch.ones(nbytes, dtype=torch.uint8)
        return returned

    return action


def mapping(path: Path, rank: int, ranks: int) -> Action:
    def action() -> int:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return len(mapped[:: mmap.PAGESIZE]) * 0

    return action


def failing(rank: int, ranks: int) -> Action:
    raise ValueError("not today")


@linux
@pytest.mark.slow
@pytest.mark.torchrun
def test_a_peak_counts_copies_but_neither_results_nor_mapped_files(tmp_path: Path) -> None:
    copied = peak(partial(taking, 80 * MIB, 0), tmp_path)
    assert 60 * MIB < copied.own < 90 * MIB and 79 * MIB < copied.mapped < 90 * MIB
    assert abs(peak(partial(taking, 80 * MIB, 80 * MIB), tmp_path).own) < 10 * MIB
    (tmp_path / "file").write_bytes(bytes(50 * MIB))
    mapped = peak(partial(mapping, tmp_path / "file"), tmp_path)
    assert mapped.own < 5 * MIB and mapped.mapped > 45 * MIB
    assert peak(partial(taking, 40 * MIB, 0), tmp_path, ranks=2).own > 30 * MIB


@linux
def test_a_job_that_fails_is_no_figure(tmp_path: Path) -> None:
    with pytest.raises(EOFError):
        peak(failing, tmp_path)


def test_curves_are_drawn_with_their_names() -> None:
    curves = (Curve("ours", ((1, 0.5), (10, 2))), Curve("<theirs>", ((1, 3), (10, 30))))
    drawn = ElementTree.fromstring(plot("growth", [Panel("seconds", "ranks", "s", curves)]))
    texts = {element.text for element in drawn.iter() if element.text}
    assert {"seconds", "ranks", "ours", "<theirs>", "0.1 s", "100 s"} <= texts


def test_figures_are_medians_of_rounds() -> None:
    measured = [([1000.0], [1000.0, 40.0, 200.0]), ([2000.0], [2000.0, 80.0, 400.0]), ([1000.0], [1010.0, 50.0, 300.0])]
    assert [bar.figure for bar in imports._rows(measured)] == [60.0, 50.0, 300.0]
    names = (maps.OURS, maps.PLAIN, maps.ASKED, maps.KEPT, maps.NEW, maps.ALONE)
    bars = maps._rows("tree", {name: [0.5, 9.0, 0.5] for name in names}, 100_000)
    assert [bar.figure for bar in bars] == pytest.approx([1.0, 1.0, 5.0, 5.0])
