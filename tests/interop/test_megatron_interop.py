"""interop.megatron, case by case: factories and their changes, what isn't Megatron-Core's, and errors."""

from __future__ import annotations

import subprocess
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardtree.errors import MetadataError, UnsupportedValue
from shardtree.interop.megatron import from_megatron, to_megatron
from shardtree.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.trees import apply_factories
from tests.core.trees.samples import halves, join_halves
from tests.interop import old_megatron as old
from tests.quick_python.command import quick_python

ROOT = Path(__file__).parents[2]


def box(key: str = "w", **changes: Any) -> Any:
    fields = {"data": torch.arange(6.0).reshape(2, 3), "dtype": torch.float32, "local_shape": (2, 3)}
    fields |= {"global_shape": (4, 3), "global_offset": (2, 0), "axis_fragmentations": (2, 1)}
    return old.ShardedTensor(key, **(fields | changes))


def rows(key: str, data: Any, replica_id: Any) -> Any:
    """Build, as early versions of Megatron-Core had it: without a range."""
    parts = enumerate(data.chunk(2))
    return [
        old.ShardedTensor(key, part, part.dtype, part.shape, (4, 3), (2 * n, 0), (2, 1), replica_id)
        for n, part in parts
    ]


def test_sequences_of_any_kind_become_tuples() -> None:
    theirs = box(local_shape=torch.Size([2, 3]), global_shape=[4, 3], replica_id=[0, 2])
    ours = from_megatron({"w": theirs})["w"]
    assert (ours.local_shape, ours.global_shape, ours.replica_id) == ((2, 3), (4, 3), (0, 2))


def test_what_a_version_has_no_field_for_takes_its_default() -> None:
    class ShardedTensor:
        key, data, local_shape, global_shape, global_offset = "w", torch.zeros(2, 3), (2, 3), (5, 4, 3), (1, 2, 0)

    ours = from_megatron([ShardedTensor()])[0]
    assert (ours.dtype, ours.prepend_axis_num, ours.axis_fragmentations) == (torch.float32, 1, None)
    assert (ours.replica_id, ours.allow_shape_mismatch, ours.flattened_range) == (0, False, None)


def test_a_subclass_of_theirs_is_theirs() -> None:
    class Padded(old.ShardedTensor):
        pass

    theirs = box()
    assert from_megatron([Padded(**vars(theirs))]) == from_megatron([theirs])


def test_what_only_shares_a_name_stays() -> None:
    class ShardedTensor:  # as torch.distributed has one
        local_shards: tuple[Any, ...] = ()

    class Other:
        key, data = "w", None

    unknown = [ShardedTensor(), Other(), ShardedObject, old.ShardedTensor, None, "text", SimpleNamespace(key="w")]
    assert all(left is right for left, right in zip(from_megatron(unknown), unknown, strict=True))


# -- factories


def test_a_range_reaches_factories_that_take_one() -> None:
    class ShardedTensorFactory(old.ShardedTensorFactory):
        flattened_range: Any = None

        def build(self) -> Any:
            return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    theirs = ShardedTensorFactory("w", torch.zeros(4), lambda *given: [given], list)
    assert replace(from_megatron([theirs])[0], flattened_range=slice(1, 5)).build()[0][3] == slice(1, 5)
    assert theirs.flattened_range is None


def test_a_range_for_a_factory_that_takes_none_is_refused() -> None:
    ours = from_megatron([old.ShardedTensorFactory("w", torch.zeros(4, 3), rows, torch.cat)])[0]
    with pytest.raises(UnsupportedValue, match=r"'w'.*cannot build a flat range"):
        replace(ours, flattened_range=slice(0, 12)).build()


def test_a_function_keeps_no_tensor_alive() -> None:
    theirs = old.ShardedTensorFactory("w", torch.zeros(4, 3), rows, torch.cat)
    assert from_megatron([theirs])[0].without_data().build_fn.empty.data is None
    assert theirs.data is not None


def test_a_merge_of_theirs_may_change_what_it_is_given() -> None:
    def destructive(loaded: Any) -> Any:
        return torch.cat([loaded.pop(), loaded.pop()])

    ours = from_megatron([old.ShardedTensorFactory("w", None, rows, destructive)])[0]
    loaded = [torch.zeros(1), torch.ones(1)]
    assert ours.merge_fn(loaded).tolist() == [1, 0]
    assert len(loaded) == 2


def nested_here(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
    return {"inner": ShardedTensorFactory(f"{key}.inner", data, halves, join_halves, replica_id)}


def test_ours_that_build_factories_are_whole_for_megatron() -> None:
    data = torch.arange(3.0)
    ours = ShardedTensorFactory("w", data, nested_here, lambda loaded: loaded["inner"] * 1)
    theirs = to_megatron([ours], mapping=old)[0]
    built = theirs.build()  # takes no range, as early versions
    assert [type(part) for part in built["inner"]["parts"]] == [old.ShardedTensor] * 2
    loaded = {"inner": {"parts": [part.data for part in built["inner"]["parts"]]}}
    assert torch.equal(theirs.merge_fn(loaded), data)


# -- errors


def contradicting(**changes: Any) -> Any:
    theirs = box("o")
    vars(theirs).update(changes)
    return theirs


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (contradicting(global_shape=(3, 3)), "global_offset"),
        (contradicting(dtype=torch.int8), "dtype"),
        (contradicting(flattened_range=slice(5, 9)), "flattened_range"),
        (contradicting(replica_id="main"), "replica_id"),
        (contradicting(key=3), "key"),
        (old.ShardedObject("o", 1, (2,), (2,)), "global_offset"),
        (old.ShardedTensorFactory("o", None, None, torch.cat), "build_fn"),
    ],
)
def test_contradicting_fields_are_an_error_with_key_and_path(theirs: Any, message: str) -> None:
    with pytest.raises(MetadataError, match=message) as caught:
        from_megatron({"model": [theirs]})
    assert f"{theirs.key!r} at tree['model'][0]" in str(caught.value)


def test_what_a_factory_builds_wrongly_is_named() -> None:
    theirs = old.ShardedTensorFactory("w", torch.zeros(4, 3), lambda *_: [box("w", dtype=torch.int8)], torch.cat)
    with pytest.raises(MetadataError, match=r"'w' at tree\[0\]") as caught:
        apply_factories(from_megatron({"model": theirs}))
    assert caught.value.__notes__ == ["at tree['model']"]


@pytest.mark.parametrize("closed", [tuple, lambda items: OrderedDict(a=tuple(items))])
def test_a_shard_where_megatron_does_not_look_is_an_error(closed: Any) -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    with pytest.raises(UnsupportedValue, match=r"'w' at tree\['m'\].*\n.*only in dicts and lists"):
        to_megatron({"m": closed([shard])}, mapping=old)
    assert to_megatron({"m": closed([3])}, mapping=old) == {"m": closed([3])}


def test_a_field_that_a_version_has_not_is_an_error_where_it_says_something() -> None:
    classes = SimpleNamespace(ShardedTensor=old.ShardedObject)
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    with pytest.raises(UnsupportedValue, match="has no field 'dtype'"):
        to_megatron([shard], mapping=classes)


# -- without Megatron-Core, and with it


def run(code: str) -> str:
    command = [*quick_python(), "-W", "error:::shardtree", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_importing_and_from_megatron_do_not_import_megatron() -> None:
    code = "import sys, shardtree.interop.megatron as m; m.from_megatron({'a': 1}); print(*sys.modules)"
    assert [name for name in run(code).split() if name.split(".")[0] in {"megatron", "hypothesis"}] == []


@pytest.mark.slow
def test_to_megatron_says_what_to_install() -> None:
    code = """if True:
        import sys
        sys.modules["megatron"] = None
        from shardtree.errors import CheckpointingException
        from shardtree.interop.megatron import to_megatron
        try:
            to_megatron({})
        except CheckpointingException as error:
            print(error)
    """
    assert "pip install megatron-core" in run(code)


@pytest.mark.peers
def test_a_flat_shard_is_an_error_for_a_megatron_without_them() -> None:
    pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    shard = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (2, 3), flattened_range=slice(1, 4))
    with pytest.raises(UnsupportedValue, match=r"Megatron-Core 0\.16 removed flat shards"):
        to_megatron({"a": shard})
    assert to_megatron({"a": shard}, mapping=old)["a"].flattened_range == slice(1, 4)
