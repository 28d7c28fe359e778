"""Objects in an optimizer's state that can't be stored are named with their parameter, in every format and on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import UnsupportedValue
from shardtree.storage import MemoryStorage


class Projector:
    """What GaLore keeps beside a parameter's moments."""

    def __init__(self) -> None:
        self.rank, self.matrix = 4, torch.ones(2, 2)


VALUES: dict[str, tuple[Any, str]] = {
    "an object": (Projector(), ""),
    "a function": (lambda step: step, ""),
    "an object in a dict": ({"inner": [Projector()]}, r"\['inner'\]\[0\]"),
}


def sharded(value: Any) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.state[model[1].weight]["projector"] = value
    tree = {name: st.ShardedTensor.from_rank_offsets(name, weight) for name, weight in model.named_parameters()}
    params = st.optim.get_param_id_to_sharded_param_map(tree, model.parameters())
    return {"optimizer": st.optim.optim_state_to_sharding_state(optimizer.state_dict(), params)}


@pytest.mark.parametrize("backend", [("safetensors", 1), ("torch_dist", 1), ("dcp", 1), ("zarr", 3)], ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_what_cannot_be_stored_is_named_with_its_parameter(name: str, backend: tuple[str, int]) -> None:
    value, inside = VALUES[name]
    text = (
        rf"ShardedObject 'optimizer\.state\.projector\.1\.weight/shard_0_1', whose data is tree\S*: .*{inside} cannot"
    )
    with pytest.raises(UnsupportedValue, match=text):
        st.save(sharded(value), MemoryStorage(), backend)


def test_other_ranks_hear_it_too() -> None:
    folder = MemoryStorage()

    def save(world: Any) -> str:
        value = Projector() if world.rank == 1 else 3
        with pytest.raises(UnsupportedValue) as caught:
            st.save(
                {"p": st.ShardedObject("optimizer.state.projector.w", value, (2,), (world.rank,))}, folder, world=world
            )
        return str(caught.value)

    assert all("'optimizer.state.projector.w/shard_1_2'" in text for text in st.simulate(2, save))
