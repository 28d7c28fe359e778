"""Records of what is wrong follow one protocol: they print alike, sort by their keys, and travel between ranks."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch

import shardtree as st
from shardtree import traces
from shardtree.checkpoint import KindDifference, ReplicaDifference, ValueDifference
from shardtree.core.offences import Offence, by_key, offence_lines, offence_text, offences_text
from shardtree.core.plans import PrefixDifference
from shardtree.layouts import Problem, TensorKind
from shardtree.objects import ShapeChange
from shardtree.plans import FailedCheck, Gap, Misfit, Mismatch, Refusal, ScaledValues, Undecided, Unexpected
from shardtree.storage import Refusal as StorageRefusal
from shardtree.strategies import Damage

KIND, OTHER = TensorKind(torch.float32, (4,), 0), TensorKind(torch.int8, (4, 2), 0)

OFFENCES: dict[str, Offence] = {
    "'w' (ranks 0-2): is held twice": Problem("w", (0, 1, 2), "is held twice", fix="Hold it once."),
    "tree['optimizer']['lr']: 1 on rank 0, 2 on rank 1": Problem(("optimizer", "lr"), (), "1 on rank 0, 2 on rank 1"),
    "'w': not stored (did you mean 'v'?)": Unexpected("w", "v"),
    "'w': not stored as shards: it is a plain tensor of the common state at a.w": Unexpected("w", path="a.w"),
    "'w': cannot be read: it is packed": Unexpected("w", refusal="it is packed"),
    "'w': checkpoint has (4,) float32, target asks for (4, 2) int8": Mismatch("w", KIND, OTHER),
    "'w' at (2,): 1 of 2 elements are stored: rank 3 is missing": Gap("w", (2,), 1, 2, "rank 3 is missing"),
    "'w': it is packed": Refusal("w", "it is packed"),
    "'w': float8_e4m3fn values that need 's' beside them": ScaledValues("w", torch.float8_e4m3fn, ("s",)),
    "'rng': objects of shape (2,), asked for in shape (3,)": ShapeChange("rng", ((2,),), (3,)),
    "2 keys are stored with 'm.' before them: 'w' as 'm.w', and so on": PrefixDifference(
        ("w", "v"), ("m.w", "m.v"), "", "m."
    ),
    "ShapeError: load: it does not fit": FailedCheck((0,), st.errors.ShapeError, "load: it does not fit"),
    "'w': only values can tell": Undecided("w", "only values can tell"),
    "'w': rank 1 holds other elements than rank 0: no elements, or another dtype or shape": ReplicaDifference(
        "w", (1,), (0,), "[0:4]", None
    ),
    "'w': (4,) float32 and (4, 2) int8": KindDifference("w", KIND, OTHER),
    "'w': 1 of 4 elements differ; the first at (2,): 1 and 3": ValueDifference("w", 1, 4, (2,), 1, 3, None),
    "0.bin, bytes 0 to 9: cut": Damage("0.bin", "cut", 0, 9),
    "storage: folders cannot be synced, so a power failure may lose the names of files that were just written: "
    "'/mnt'\n  found EPERM": StorageRefusal("sync", "/mnt", "EPERM"),
    "'w': 3 elements reach no output: [0:3]": traces.Problem("unused", "w", 3, "[0:3]"),
    "'w': 3 elements are 0, not 1": traces.Difference("w", 3, "0", "1"),
}
OWN_TEXT = (PrefixDifference, FailedCheck, Damage, StorageRefusal, traces.Problem)
"""Records whose text isn't `key where: what`: it stands alone, or names a file rather than a key."""


def is_offence(record: object) -> bool:
    """Return whether a record follows the protocol: texts under four names, and it can't be changed."""
    texts = all(isinstance(getattr(record, name, None), str) for name in ("where", "what", "fix"))
    return texts and isinstance(getattr(record, "key", None), (str, tuple)) and is_dataclass(record)


@pytest.mark.parametrize("text", OFFENCES)
def test_every_record_follows_the_protocol(text: str) -> None:
    """It has the four texts, prints as one, and arrives at another rank as it was."""
    record = OFFENCES[text]
    assert is_offence(record) and str(record) == text
    assert isinstance(record, OWN_TEXT) or str(record) == offence_text(record)
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_record_that_lacks_a_text_is_told() -> None:
    """Planted: a record without advice."""

    @dataclass(frozen=True)
    class Adviceless:
        key: str
        where: str
        what: str

    assert not is_offence(Adviceless("w", "", "is held twice"))


def test_no_record_is_left_out() -> None:
    """Every class with `what` and `fix` is among the samples, and so is each kind of misfit."""
    package = Path(st.__file__).parent
    places = [path.relative_to(package.parent).with_suffix("") for path in package.rglob("*.py")]
    sampled = {type(record) for record in OFFENCES.values()}
    for place in places:
        if "def what(self)" in (package.parent / place.with_suffix(".py")).read_text():
            module = import_module(".".join(place.parts))
            classes = [each for each in vars(module).values() if isinstance(each, type) and "what" in vars(each)]
            assert {each for each in classes if each is not Offence} <= sampled, place
    assert set(get_args(Misfit)) <= sampled


def test_lines_sort_and_shorten_by_key() -> None:
    """Three lines a key are shown, whatever records they are."""
    gaps = [Gap("w", (row,), 0, 1) for row in range(5)]
    lines = offence_lines(sorted([*gaps, Unexpected("a")], key=by_key))
    assert lines[0] == "'a': not stored" and lines[3:] == ["'w' at (2,): 0 of 1 elements are stored", "'w': and 2 more"]


def test_an_error_gives_each_advice_once() -> None:
    """In the order of the records, then what else can be done."""
    text = offences_text("load", [Unexpected("a"), Unexpected("b"), Gap("w", (0,), 0, 1, "why")], "Or wait.")
    assert text.split("\n  ")[4:] == [Unexpected("a").fix, "Load only stored elements.", "Or wait."]
