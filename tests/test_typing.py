"""What a type checker knows of calls: that an asynchronous save can be scheduled, and which trees come back."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import get_overloads, get_type_hints

import pytest

import shardtree as st

SAMPLE = """
from __future__ import annotations

from typing import Any, assert_type

import torch
import shardtree as st

shards = {"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2))}
strict = st.StrictHandling


def saves(queue: st.AsyncCallsQueue, series: st.CheckpointSeries, later: bool) -> None:
    queue.schedule_async_request(st.save(shards, "a", async_sharded_save=True))
    queue.schedule_async_request(st.save(shards, "a", None, None, True, True, overwrite=True))
    queue.schedule_async_request(series.save(shards, 1, async_sharded_save=True))
    assert_type(st.save(shards, "a", async_sharded_save=later), st.AsyncRequest[Any] | None)
    assert_type(series.save(shards, 1, async_sharded_save=later), st.AsyncRequest[Any] | None)


def loads(which: str, anything: Any) -> None:
    assert_type(st.load(shards, "a"), dict[str, Any])
    assert_type(st.load(shards, "a", strict=strict.RAISE_ALL, cast=True), dict[str, Any])
    assert_type(st.load(shards, "a", strict="log_all"), dict[str, Any])
    assert_type(st.load(shards, "a", strict=strict.RETURN_ALL), tuple[dict[str, Any], set[str], set[str]])
    assert_type(st.load(shards, "a", strict="return_unexpected"), tuple[dict[str, Any], set[str], set[str]])
    assert_type(st.load(shards, "a", strict=which), Any)
    assert_type(st.load([shards], "a"), Any)
    assert_type(st.load(anything, "a"), Any)


def maps(anything: Any) -> None:
    assert_type(st.rename(shards, {"w": "v"}), dict[str, st.ShardedTensor])
    assert_type(st.transforms.partial_rename(shards, {"*": "model.*"}), dict[str, st.ShardedTensor])
    assert_type(st.prefix(shards, "model."), dict[str, st.ShardedTensor])
    assert_type(st.cast([*shards.values()], torch.bfloat16), list[st.ShardedTensor])
    assert_type(st.without_data(shards), dict[str, st.ShardedTensor])
    assert_type(st.map_data(torch.neg, shards), dict[str, st.ShardedTensor])
    assert_type(st.map_shards(str, shards), dict[str, Any])
    assert_type(st.map_shards(str, [shards]), list[Any])
    assert_type(st.map_shards(str, (shards,)), Any)
    assert_type(st.rename(anything, {}), Any)

"""

WRONG = """
st.save(shards, "a", overwrit=True)
st.AsyncCallsQueue().schedule_async_request(st.save(shards, "a"))
assert_type(st.load(shards, "a"), None)
"""

OPTIONS = """
[mypy]
strict = True
python_version = 3.12
follow_imports = silent
[mypy-torch.*,numpy.*,optree.*]
follow_imports = skip
"""


def complaints(sample: str, folder: Path) -> list[str]:
    """Return the lines that mypy, in its strict mode, finds wrong; other libraries' types count as Any, to be quick."""
    api = pytest.importorskip("mypy.api")
    (folder / "sample.py").write_text(sample)
    (folder / "mypy.ini").write_text(OPTIONS)
    options = [f"--config-file={folder / 'mypy.ini'}", f"--cache-dir={folder / 'cache'}"]
    limit = sys.getrecursionlimit()
    said, wrong, _ = api.run([*options, str(folder / "sample.py")])
    sys.setrecursionlimit(limit)  # mypy raises it
    assert wrong == ""
    found = re.findall(r"^\S*sample.py:(\d+): error: ", said, re.MULTILINE)
    return [sample.splitlines()[line - 1] for line in sorted(set(map(int, found)))]


@pytest.mark.slow
def test_a_type_checker_knows_what_comes_back(tmp_path: Path) -> None:
    assert complaints(SAMPLE + WRONG, tmp_path) == WRONG.split("\n")[1:-1]


def test_each_overload_takes_what_the_function_takes() -> None:
    function = (
        st.CheckpointSeries.save
    )  # those of `save` and `load` stand in stubs: tests/shell/checkpoint/test_typed.py
    assert [missing(overload, function) for overload in get_overloads(function)] == [set()] * 3


def test_an_overload_that_lacks_an_argument_is_found() -> None:
    assert "layout" in missing(lambda sharded_state_dict, checkpoint_dir: None, st.save)


def missing(overload: object, function: object) -> set[str]:
    """Return the parameters that only one of the two has, by name alone or not."""
    own = inspect.signature(overload).parameters
    rest = {name for name, each in own.items() if each.kind is each.VAR_KEYWORD}
    # What `Unpack` names counts as written out; `**keywords: Any` is a parameter of its own.
    unpacked = {name: getattr(get_type_hints(overload)[name], "__args__", None) for name in rest}
    named = {key for name, kinds in unpacked.items() for key in (kinds[0].__annotations__ if kinds else [name])}
    return (own.keys() - rest | named) ^ inspect.signature(function).parameters.keys()
