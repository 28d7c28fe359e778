"""Lenses beside Megatron-Core's own factories and its attention: the same keys, places and elements."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.interop.megatron import from_megatron
from shardtree.lenses import Lens, as_factory, attention_qkv, compose, gate_and_up, transposed, unstacked_layers
from shardtree.testing import check_lens, first_difference
from tests.peers.groups import Group

theirs = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = pytest.mark.peers

Box = tuple[Any, ...]


def box(shard: Any) -> Box:
    """Return what is stored, and where, whichever library says it; prepended axes are as good as own ones."""
    front = (1,) * shard.prepend_axis_num
    place = shard.key, tuple(shard.global_shape), tuple(shard.global_offset), (*front, *shard.local_shape)
    return *place, tuple(shard.replica_id), shard.data.reshape(-1).tolist()


def boxes(tree: Any) -> list[Box]:
    if isinstance(tree, dict):
        return [each for value in tree.values() for each in boxes(value)]
    if isinstance(tree, list | tuple):
        return [each for value in tree for each in boxes(value)]
    return [box(tree)] if hasattr(tree, "global_offset") and hasattr(tree, "local_shape") else []


def elements(tree: Any) -> dict[Any, float]:
    """Return each element by its key and place: what matters where others store one box for two beside each other."""
    found = {}
    for key, whole, offset, shape, replica, values in boxes(tree):
        for number, index in enumerate(product(*map(range, shape))):
            place = tuple(low + at for low, at in zip(offset, index, strict=True))
            found[key, whole, place, replica] = values[number]
    return found


def check_same(ours: Any, theirs: Any, *, boxes_too: bool) -> None:
    """Raise unless both store the same elements in the same places, and the same boxes, if that is asked for."""
    assert elements(ours) == elements(theirs)
    if boxes_too:
        assert sorted(boxes(ours)) == sorted(boxes(theirs))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("layers", [(), ((0, 2, 5),)], ids=["alone", "in a layer"])
@pytest.mark.parametrize("apart", [False, True], ids=["in one", "apart"])
def test_swiglu_is_stored_as_theirs(ranks: int, layers: tuple[Any, ...], apart: bool) -> None:
    mlp = pytest.importorskip("megatron.core.transformer.mlp")
    names: dict[str, Any] = {"part": "fc1", "names": ("fc1_w", "fc1_v")} if apart else {}
    lens = gate_and_up(tensor_parallel=ranks, **names)
    for rank in range(ranks):
        data = torch.randn(16 // ranks, 3)
        axis = len(layers)
        original = theirs.ShardedTensor.from_rank_offsets(
            "mlp.fc1", data, *layers, (axis, rank, ranks), replica_id=(0, 0, rank), prepend_axis_num=axis
        )
        factory = mlp.apply_swiglu_sharded_factory(original, layers, apart)
        our_tree = as_factory(from_megatron({"w": original})["w"], lens).build()
        check_same(our_tree, factory.build(), boxes_too=ranks > 1 or apart)


def test_the_comparison_catches_halves_cut_for_one_rank() -> None:
    mlp = pytest.importorskip("megatron.core.transformer.mlp")
    original = theirs.ShardedTensor.from_rank_offsets("w", torch.randn(8, 3), (0, 1, 2), replica_id=(0, 0, 0))
    factory = mlp.apply_swiglu_sharded_factory(original, ())
    blind = as_factory(from_megatron({"w": original})["w"], gate_and_up(tensor_parallel=1))
    with pytest.raises(AssertionError):
        check_same(blind.build(), factory.build(), boxes_too=False)


class Linear(torch.nn.Module):
    """A layer that gives its outputs, and no bias, as theirs do."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return inputs @ self.weight.T, None


HEADS, GROUPS, SIZE, WIDTH = 8, 4, 2, 3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_queries_keys_and_values_are_those_of_their_attention(ranks: int) -> None:
    attention = pytest.importorskip("megatron.core.transformer.attention")
    rows = (HEADS + 2 * GROUPS) * SIZE
    whole = torch.randn(rows, WIDTH)
    lens = attention_qkv(heads=HEADS, head_size=SIZE, query_groups=GROUPS, part="qkv", names=("q", "k", "v"))
    shards = [
        st.ShardedTensor.from_rank_offsets("qkv", part, (0, rank, ranks))
        for rank, part in enumerate(whole.chunk(ranks))
    ]
    stored = check_lens(lens, shards)
    inputs = torch.eye(WIDTH)[:, None]  # so that what comes out is the weight itself
    for rank, shard in enumerate(shards):
        layer = SimpleNamespace(
            linear_qkv=Linear(shard.data),
            config=SimpleNamespace(num_query_groups=GROUPS, test_mode=False),
            num_attention_heads_per_partition=HEADS // ranks,
            num_query_groups_per_partition=GROUPS // ranks,
            hidden_size_per_attention_head=SIZE,
            world_size=ranks,
            q_layernorm=None,
            k_layernorm=None,
        )
        theirs_split = attention.SelfAttention.get_query_key_value_tensors(layer, inputs)
        for name, tensor in zip("qkv", theirs_split, strict=True):
            expected = tensor.reshape(WIDTH, -1).T.contiguous()
            assert first_difference(stored[name].chunk(ranks)[rank].contiguous(), expected) is None


EXPERTS, HIDDEN, FFN = 4, 3, 8


def their_experts(ep: Group, tp: Group, weight1: torch.Tensor, weight2: torch.Tensor, *, apart: bool) -> Any:
    """Return the factories of Megatron-Core's experts that lie in one tensor, for one rank."""
    experts = pytest.importorskip("megatron.core.transformer.moe.experts")
    layer = SimpleNamespace(
        ep_group=ep,
        tp_group=tp,
        dp_group=Group(1),
        num_local_experts=EXPERTS // ep.size(),
        weight2=weight2,
        config=SimpleNamespace(hidden_size=HIDDEN, gated_linear_unit=True),
        state_dict=lambda **_: {"weight1": weight1, "weight2": weight2},
    )
    return experts.GroupedMLP.sharded_state_dict(layer, "mlp.", (), {"singleton_local_shards": apart})


@pytest.mark.parametrize(("expert_ranks", "ranks"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "a key each"])
def test_grouped_experts_are_stored_as_theirs(expert_ranks: int, ranks: int, apart: bool) -> None:
    local, gated = EXPERTS // expert_ranks, gate_and_up(tensor_parallel=ranks, axis=1, **(NAMES if apart else {}))
    lenses: list[Lens] = [compose(transposed(), gated), transposed()]
    if apart:
        lenses = [compose(lens, unstacked_layers("mlp.experts")) for lens in lenses]
    for at in range(expert_ranks):
        for rank in range(ranks):
            memory = torch.randn(local, HIDDEN, 2 * FFN // ranks), torch.randn(local, FFN // ranks, HIDDEN)
            # They hold the same memory with two axes.
            flat = memory[0].view(HIDDEN, -1), memory[1].view(-1, HIDDEN)
            tree = their_experts(Group(expert_ranks, at), Group(ranks, rank), *flat, apart=apart)
            for number, (data, lens) in enumerate(zip(memory, lenses, strict=True)):
                cut = (2 - number, rank, ranks)
                shard = st.ShardedTensor.from_rank_offsets(
                    f"mlp.experts.linear_fc{number + 1}.weight", data, (0, at, expert_ranks), cut, replica_id=(0, 0, 0)
                )
                expected = tree[f"mlp.weight{number + 1}"].build()
                check_same(as_factory(shard, lens).build(), expected, boxes_too=ranks > 1 or apart)


NAMES: dict[str, Any] = {"part": "linear_fc1.weight", "names": ("linear_fc1.weight_w", "linear_fc1.weight_v")}
