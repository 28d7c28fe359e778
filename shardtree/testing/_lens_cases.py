"""Examples of all predefined lenses, each with a tensor that it fits, for the laws of lenses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..lenses import (
    Lens,
    attention_qkv,
    by_pattern,
    compose,
    expert_keys,
    expert_stack,
    gate_and_up,
    mapped_axis,
    padded_axis,
    rearranged,
    renamed,
    rotary_halves,
    rotary_pairs,
    stacked_layers,
    tied,
    transposed,
    unstacked_layers,
)
from ..lenses import grouped_runs as groups


@dataclass(frozen=True, slots=True)
class LensCase:
    """A lens, and tensors as the model has them.

    Attributes:
        lens: the lens.
        shape: of the global tensors.
        keys: of the global tensors that the lens stores together.
        prepended: how many leading axes are prepended.
    """

    lens: Lens
    shape: tuple[int, ...]
    keys: tuple[str, ...] = ("layers.3.mlp.w.weight",)
    prepended: int = 0


_grouped = partial(attention_qkv, heads=4, head_size=2, query_groups=2)
_apart = partial(_grouped, part="w", names=("q", "k", "v"))
_ROTARY = {"**.q.**": rotary_halves(head_size=2), "**.k.**": rotary_halves(head_size=2), "**.v.**": None}

# Axes mostly of different lengths, so that an exchange of axes shows in the shape; few elements, since the laws visit
# each of them for many layouts.
LENS_CASES: dict[str, LensCase] = {
    "transposed": LensCase(transposed(), (3, 4)),
    "transposed: a prepended axis": LensCase(transposed(), (2, 3, 4), prepended=1),
    "transposed: three axes": LensCase(transposed(2, 0, 1), (2, 3, 4)),
    "gate_and_up: 1 rank": LensCase(gate_and_up(tensor_parallel=1), (8, 3)),
    "gate_and_up: 3 ranks": LensCase(gate_and_up(tensor_parallel=3), (12, 2)),
    "gate_and_up: named": LensCase(
        gate_and_up(tensor_parallel=2, part="w", names=("gate", "up")), (2, 8, 1), prepended=1
    ),
    "gate_and_up: axis 1": LensCase(gate_and_up(tensor_parallel=2, axis=1, part="w", names=("gate", "up")), (3, 8)),
    "attention_qkv: multi-head": LensCase(attention_qkv(heads=3, head_size=2), (18, 2)),
    "attention_qkv: grouped": LensCase(_apart(), (16, 2)),
    "attention_qkv: grouped, in one": LensCase(_grouped(), (16, 2)),
    "attention_qkv: bias": LensCase(_apart(), (16,)),
    "attention_qkv: to interleaved": LensCase(_grouped(held="concatenated", stored="interleaved"), (16, 2)),
    "attention_qkv: rank by rank": LensCase(_apart(held="concatenated", tensor_parallel=2), (16, 2)),
    "attention_qkv: rank by rank, in one": LensCase(
        attention_qkv(heads=4, head_size=1, held="concatenated", tensor_parallel=2), (12, 2)
    ),
    "rotary_halves": LensCase(rotary_halves(head_size=4), (12, 2)),
    "rotary_halves: some rows": LensCase(rotary_halves(head_size=5, rotary_size=4), (10,)),
    "rotary_pairs": LensCase(rotary_pairs(head_size=6), (12, 2)),
    "stacked_layers": LensCase(stacked_layers("layers", 2), (3, 2), ("layers.0.w", "layers.1.w"), 1),
    "stacked_layers: of a scalar": LensCase(stacked_layers("layers", 2, first=-2), (), ("layers.2.w", "layers.3.w")),
    "unstacked_layers": LensCase(unstacked_layers("layers"), (3, 2, 2), ("layers.norm",)),
    "unstacked_layers: a prepended axis": LensCase(unstacked_layers("layers"), (3, 2, 2), ("layers.norm",), 1),
    "expert_stack": LensCase(expert_stack(experts=3, axis=1), (2, 6)),
    "expert_keys": LensCase(expert_keys("experts", experts=2), (6, 2), ("mlp.experts.fc2",)),
    "expert_keys: in stacked layers": LensCase(
        expert_keys("experts", experts=2), (2, 6, 2), ("layers.experts.fc2",), 1
    ),
    "padded_axis": LensCase(padded_axis(5), (8, 2)),
    "padded_axis: axis 1": LensCase(padded_axis(3, axis=1), (2, 6)),
    "tied": LensCase(tied("w", "embedding"), (3, 2)),
    "renamed": LensCase(renamed("mlp.w", "ffn"), (3, 2)),
    "by_pattern": LensCase(compose(_apart(), by_pattern(_ROTARY)), (16, 2)),
    "rearranged: experts": LensCase(rearranged("(e f) h -> e h f", e=2), (6, 2)),
    "rearranged: ranks of experts": LensCase(
        rearranged("h (p t e two f) -> (p e) (two t f) h", p=2, t=2, e=1, two=2), (2, 16)
    ),
    "rearranged: prepended too": LensCase(rearranged("l e d -> d (l e)"), (2, 2, 3), prepended=1),
    "mapped_axis": LensCase(mapped_axis(-1, lambda n: groups(n, 2, (1, 2)), part="w", names=("a", "b")), (2, 6)),
    "compose": LensCase(compose(), (2, 3)),
    "compose: four deep": LensCase(
        compose(
            expert_keys("experts", experts=2, axis=1),
            gate_and_up(tensor_parallel=2, axis=1, part="w", names=("gate", "up")),
            transposed(),
            stacked_layers("experts", 2),
            stacked_layers("layers", 2),
        ),
        (3, 16),
        ("layers.0.experts.w", "layers.1.experts.w"),
    ),
}
"""By name: that of the predefined lens, and what is special about the example."""
