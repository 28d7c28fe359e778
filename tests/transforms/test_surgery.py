"""Surgery of any kind gives the same bits in memory, over lazy tensors, on shards, and streamed by a conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.core.lazy import LazyTensor
from shardtree.testing import check_commutes, first_difference, random_bits
from tests.options import convert_keywords
from tests.transforms.flat_trees import Tree, flat, lazily, whole

RUNS = 3
Surgery = Callable[..., Tree]


def tensors(run: int) -> dict[str, torch.Tensor]:
    """Return a model of three layers, its moments, and an adapter for one of its weights."""
    some = partial(torch.randn, generator=torch.Generator().manual_seed(run))
    layers = {f"h.{n}.{name}": some(shape) for n in range(3) for name, shape in (("w", (6, 4)), ("norm", (4,)))}
    states = {f"optimizer.state.exp_avg.{key}": some(tensor.shape) for key, tensor in layers.items()}
    return {"embed": some(5, 4), **layers, **states, "h.0.w.A": some(2, 4), "h.0.w.B": some(6, 2)}


def model(run: int) -> Tree:
    return flat(*(whole(key, tensor) for key, tensor in tensors(run).items()))


def mean(shard: Any, *others: Any) -> Any:
    total = reduce(lambda left, right: left + right.data, others, shard.data)
    return replace(shard, data=total / (1 + len(others)))


def merged(tree: Tree, *_: Tree) -> Tree:
    weight, low, high = (tree[key] for key in ("h.0.w", "h.0.w.A", "h.0.w.B"))
    adapted = replace(weight, data=weight.data + 0.5 * (high.data @ low.data))
    return {key: leaf for key, leaf in tree.items() if leaf is not low and leaf is not high} | {"h.0.w": adapted}


def pruned(tree: Tree, *_: Tree) -> Tree:
    return st.transforms.keep_layers(tree, "h", [2, 0, 2])


def grown(tree: Tree, *_: Tree) -> Tree:
    return st.transforms.pad_tensors(tree, ["embed"], 9, fill=lambda table: table.mean(0))


def halved(tree: Tree, *_: Tree) -> Tree:
    return st.cast(tree, torch.bfloat16, ["h.*.w", "embed"])


def all_of_it(tree: Tree, *others: Tree) -> Tree:
    return halved(pruned(grown(merged(st.map_shards(mean, tree, *others)))))


KINDS: dict[str, Surgery] = {
    "soup": partial(st.map_shards, mean),
    "LoRA": merged,
    "pruned": pruned,
    "grown": grown,
    "dtypes": halved,
    "nested and back": lambda tree, *_: st.trees.flat(st.trees.nested({k: v for k, v in tree.items() if k[-2] != "."})),
    "all": all_of_it,
}


@pytest.fixture(scope="module")
def saved() -> list[st.storage.MemoryStorage]:
    """Return checkpoints of several runs, each saved by two ranks."""
    storages = [st.storage.MemoryStorage() for _ in range(RUNS)]
    for run, storage in enumerate(storages):
        trees = st.shard(tensors(run), st.Mesh(tp=2), lambda key, leaf: st.PartitionSpec("tp"))
        st.simulate(2, lambda world, trees=trees, storage=storage: st.save(trees[world.rank], storage, world=world))
    return storages


def read(tree: Tree) -> dict[str, torch.Tensor]:
    return {leaf.key: leaf.data.read() if isinstance(leaf.data, LazyTensor) else leaf.data for leaf in tree.values()}


def converted(surgery: Surgery, saved: list[st.storage.MemoryStorage]) -> dict[str, torch.Tensor]:
    """Return what a conversion writes, in batches of a few rows."""
    others = [dict(st.open_checkpoint(storage)) for storage in saved[1:]]
    out = st.storage.MemoryStorage()

    def transform(tree: Tree) -> Tree:
        return surgery(tree, *(st.map_shards(lambda leaf: leaf, {key: other[key] for key in tree}) for other in others))

    leave_out = sorted(saved_keys(surgery, saved))
    st.convert(
        saved[0],
        out,
        **convert_keywords(backend="safetensors", transform=transform, leave_out=leave_out),
        max_bytes_in_flight=80,
    )
    return st.load_plain_tensors(out)


def saved_keys(surgery: Surgery, saved: list[st.storage.MemoryStorage]) -> set[str]:
    """Return the keys of which a surgery uses nothing."""
    tree = dict(st.open_checkpoint(saved[0]))
    used = {fetch.name for leaf in surgery(tree, *[tree] * (RUNS - 1)).values() for fetch in leaf.data.fetches}
    return set(tree) - used


def gives_the_same_everywhere(surgery: Surgery, saved: list[st.storage.MemoryStorage]) -> None:
    eager = read(surgery(*map(model, range(RUNS))))
    ways = {
        "lazy": read(surgery(*(lazily(model(run)) for run in range(RUNS)))),
        "opened": read(surgery(*(dict(st.open_checkpoint(storage)) for storage in saved))),
        "converted": converted(surgery, saved),
    }
    for name, found in ways.items():
        assert found.keys() == eager.keys(), name
        for key, tensor in eager.items():
            assert first_difference(found[key], tensor) is None, f"{name}: {key} differs"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_memory_lazily_and_converted_it_is_the_same(kind: str, saved: list[st.storage.MemoryStorage]) -> None:
    gives_the_same_everywhere(KINDS[kind], saved)


def rounded_twice(tree: Tree, *_: Tree) -> Tree:
    lazy = isinstance(tree["embed"].data, LazyTensor)
    return halved(st.cast(tree, torch.float16) if lazy else tree)


def piece_by_piece(tree: Tree, *_: Tree) -> Tree:
    """Fill new rows with the mean of the rows at hand, which are fewer where a tensor is read in pieces."""
    data = tree["embed"].data
    rows = data[:3].read() if isinstance(data, LazyTensor) else data
    return st.transforms.pad_tensors(tree, ["embed"], 9, fill=lambda _: rows.mean(0))


@pytest.mark.parametrize("fault", [rounded_twice, piece_by_piece])
def test_the_law_catches(fault: Surgery, saved: list[st.storage.MemoryStorage]) -> None:
    with pytest.raises(AssertionError, match=r"lazy: (embed|h\.0\.w) differs"):
        gives_the_same_everywhere(fault, saved)


# On shards: each rank does it to its own.

EXACT = {key: torch.arange(24.0).view(6, 4) * n for n, key in enumerate(["h.0.w", "h.1.w"], 1)}
COLUMNS = [(st.Mesh(tp=n), st.PartitionSpec(None, "tp")) for n in (1, 2, 4)]
GROW = st.bind(st.transforms.pad_tensors, ["h.*.w"], 9, fill=lambda table: table.double().mean(0))
ON_SHARDS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "soup": (lambda tree: {"w": st.map_shards(mean, tree["h.0.w"], tree["h.1.w"])}, None),
    "dtypes": (st.bind(st.cast, torch.bfloat16, ["h.1.*"]), None),
    "rows of means, cut by columns": (GROW, COLUMNS),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ON_SHARDS)
def test_on_shards_it_is_what_it_is_on_the_whole(kind: str) -> None:
    transform, layouts = ON_SHARDS[kind]
    check_commutes(transform, EXACT, layouts=layouts, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_adapter_is_merged_on_shards_within_rounding(dtype: torch.dtype) -> None:
    """Products of other shapes are added up in another order: these differ in their last bits on some machines."""

    def merged(tree: Any) -> Any:
        return {"w": replace(tree["w"], data=tree["w"].data + 2.0 * (tree["B"].data @ tree["A"].data))}

    def otherwise(tree: Any) -> Any:
        """Scale by what a rank has, as where a rank divides by its own number of rows."""
        return {"w": replace(merged(tree)["w"], data=merged(tree)["w"].data * (6 + tree["w"].local_shape[0]))}

    shapes = {"w": (10, 10), "A": (3, 10), "B": (10, 3)}
    state = {key: random_bits(shape, torch.int8, n).to(dtype) / 7 for n, (key, shape) in enumerate(shapes.items())}
    cuts = {
        "w": st.PartitionSpec("rows", "columns"),
        "A": st.PartitionSpec(None, "columns"),
        "B": st.PartitionSpec("rows"),
    }
    layouts = [(st.Mesh(rows=rows, columns=columns), cuts) for rows, columns in ((1, 1), (3, 4), (2, 1))]
    check_commutes(merged, state, layouts=layouts)
    with pytest.raises(AssertionError, match="elements differ by more than rtol="):
        check_commutes(otherwise, state, layouts=layouts)


def test_padding_of_an_axis_that_is_cut_is_refused() -> None:
    with pytest.raises(st.errors.ShapeError, match=r"'h\.0\.w' is cut along axis 0"):
        check_commutes(GROW, EXACT)


def test_the_law_of_shards_catches_rows_that_depend_on_all_columns() -> None:
    grow = st.bind(st.transforms.pad_tensors, ["h.*.w"], 9, fill=lambda table: table.mean().expand(table.shape[1]))
    with pytest.raises(AssertionError, match="elements differ"):
        check_commutes(grow, EXACT, layouts=COLUMNS, rtol=0, atol=0)
