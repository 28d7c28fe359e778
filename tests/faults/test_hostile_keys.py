"""Keys that a file makes as long as it likes, and the numbers in them, cost neither time nor memory."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import shardtree as st
from shardtree.core.trees import differing_prefix
from shardtree.errors import CheckpointingException, IntegrityError, TreeError
from shardtree.formats.torch_dist._buckets import BucketPiece, is_bucket
from shardtree.formats.torch_dist._parameter_order import full_name, known_orders, layer_of
from shardtree.transforms import keep_layers, stack_layers, unstack_layers
from tests.faults.absurd_numbers import QUICK, entry_points

LONG = {
    "parts": "experts." * 8000 + "x",
    "one part": "a" * 60_000,
    "layers": "layers." * 8000 + "\n",
    "digits": "decoder.layers." + "9" * 5000 + ".mlp.linear_fc1.weight",
    "slashes": "a/" * 8000 + "x",
    "brackets": "[0" * 20_000,
    "states": "optimizer.state.a." * 3000 + "w",
}


def shards(*keys: str) -> dict[str, st.ShardedTensor]:
    return {key: st.ShardedTensor.from_rank_offsets(key, torch.zeros(2)) for key in keys}


@pytest.mark.slow
def test_every_entry_point_takes_long_keys(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    st.save(shards("v", *LONG.values()), folder, options=QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, call in entry_points(folder, tmp_path / "elsewhere"):
            call()


@pytest.mark.parametrize("pattern", ["**.experts.**.weight", "**.layers.**.layers.**.w", "**.state.*.**.v*"])
def test_patterns_are_matched_with_long_keys(pattern: str) -> None:
    tree = shards("v", *LONG.values())
    assert st.select(tree, pattern) == {}
    with pytest.raises(TreeError, match="patterns are unused"):
        st.cast(tree, torch.float16, keys=[pattern])


# Numbers of layers.


@pytest.mark.parametrize("change", [stack_layers, lambda tree, prefix: keep_layers(tree, prefix, [0])])
def test_a_layers_number_of_very_many_digits_is_an_error_of_ours(change: object) -> None:
    with pytest.raises(TreeError, match=r"the layer number 9+\.\.\. in a key has 5000 digits"):
        change(shards("h.0.w", f"h.{'9' * 5000}.w"), "h")  # type: ignore[operator]


def test_a_huge_number_of_a_layer_is_counted_and_not_listed() -> None:
    with pytest.raises(TreeError, match=rf"lacks layers\n  layer 1\n(.*\n){{8}}  layer 10\n  and {10**17 - 11} more"):
        stack_layers(shards("h.0.w", f"h.{10**17}.w"), "h")
    assert [*unstack_layers(shards("h.w"), "h")] == ["h.0.w", "h.1.w"]


@pytest.mark.parametrize("key", ["layers." * 100_000 + "\n", "embedding" * 100_000 + "\n", LONG["digits"]])
def test_parameters_are_put_in_order_by_keys_of_any_length(key: str) -> None:
    piece = BucketPiece(key, (), (), ())
    for order in known_orders(None):
        order.place(piece)
    assert len(full_name(piece)) >= len(key) and layer_of(piece)[0] in (0, None)
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_{}.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"
    assert [is_bucket(name.format(digits)) for digits in ("0", "9" * 5000)] == [True, False]


def test_no_prefix_is_looked_for_in_keys_of_megabytes() -> None:
    keys = ["a." * 2_000_000 + end for end in "xy"]
    assert differing_prefix(keys, ["x", "y"]) is None
    assert differing_prefix(["a.x", "a.y"], ["x", "y"]) == ("a.", "")


# Arrays of objects of any shape.


@pytest.mark.parametrize(
    ("shape", "cell", "first", "count"),
    [
        ((2**62,), (5,), r"\(0,\)", 2**62 - 11),
        ((2**40, 2**40, 3), (0, 0, 1), r"\(0, 0, 0\)\n  \(0, 0, 2\)\n  \(0, 1, 0\)", 3 * 2**80 - 11),
        ((2, -1), (1, 2**62), r"\(0, 0\)", 2 * (2**62 + 1) - 11),
    ],
)
def test_missing_objects_are_counted_and_a_few_are_named(
    shape: tuple[int, ...], cell: tuple[int, ...], first: str, count: int
) -> None:
    storage = st.storage.MemoryStorage()
    st.save([st.ShardedObject("rng", 7, shape, cell)], storage, validate_access_integrity=False)
    options, target = (
        st.LoadOptions(object_rules={"rng": st.objects.replicate_objects}),
        [st.ShardedObject("rng", None, (1,), (0,))],
    )
    with pytest.raises(IntegrityError, match=rf"at these indices\n  {first}\n(.*\n)+  and {count} more"):
        st.load(target, storage, options=options)
    assert [*st.load_sharded_metadata(storage)] and not st.verify(storage)


def test_errors_count_what_they_do_not_make() -> None:
    text = st.errors.error_text("wrong", offenders=map(str, range(2**70)), count=2**70)
    assert text.splitlines()[-1] == f"  and {2**70 - 10} more"
    assert issubclass(IntegrityError, CheckpointingException)
