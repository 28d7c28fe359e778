"""Each of torch.optim's optimizers: trained on 4 ranks, saved and loaded on 3, it goes on as if nothing was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import shardtree as st
from shardtree.errors import CheckpointingException
from shardtree.testing import bits
from tests.optim.came import CAME

SHAPES = {"bias": (12,), "weight": (12, 6), "other": (12, 6)}
ROW = {"other": 0.5, "weight": 1.0, "bias": 2.0}


class Case(NamedTuple):
    """An optimizer, and how it is used."""

    kind: str
    options: Mapping[str, Any] = {}
    names: tuple[str, ...] = ("bias", "weight", "other")
    sparse: bool = False
    elementwise: bool = True
    rules: Mapping[str, Any] | None = None


FACTORED = st.optim.adafactor_rules(where_cut="equal")
KINDS = vars(torch.optim) | {"CAME": CAME}
CASES = [
    Case("Adam"),
    Case("Adam", {"amsgrad": True}),
    Case("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    Case("SGD", {"lr": 0.1}),
    Case("SGD", {"lr": 0.1, "momentum": 0.9}),
    Case("Adagrad", {"lr_decay": 0.1}),
    Case("RMSprop"),
    Case("RMSprop", {"centered": True, "momentum": 0.9}),
    Case("Adadelta"),
    Case("Adamax"),
    Case("NAdam"),
    Case("RAdam"),
    Case("ASGD", {"t0": 1.0}),
    Case("Rprop"),
    Case("SparseAdam", sparse=True),
    Case("Adafactor", {"lr": 0.1}, elementwise=False, rules=FACTORED),
    Case("Muon", {"lr": 0.1}, names=("weight", "other"), elementwise=False),
    Case("CAME", {"lr": 0.1}, elementwise=False, rules=st.optim.came_rules(where_cut="equal")),
]
CASES = [case for case in CASES if case.kind in KINDS]


def test_no_optimizer_is_forgotten() -> None:
    kinds = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
    assert kinds - {case.kind for case in CASES} == {"Optimizer", "LBFGS"}


class Rank(NamedTuple):
    """What a rank trains: rows of each parameter."""

    params: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    rank: int
    ranks: int

    def step(self, case: Case, number: int) -> None:
        for name, param in self.params.items():
            grad = rows(gradient(name, number), self.rank, self.ranks)
            param.grad = grad.to_sparse() if case.sparse else grad
        self.optimizer.step()

    def sharded(self) -> dict[str, Any]:
        place = (0, self.rank, self.ranks)
        return {name: st.ShardedTensor.from_rank_offsets(name, param, place) for name, param in self.params.items()}


def rows(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return whole.chunk(ranks)[rank].clone()


def gradient(name: str, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + len(name))
    return torch.randn(SHAPES[name], generator=generator)


def make_rank(case: Case, weights: Mapping[str, torch.Tensor], rank: int, ranks: int) -> Rank:
    params = {name: torch.nn.Parameter(rows(weights[name], rank, ranks)) for name in case.names}
    groups = [{"params": [params[name]], "lr": 0.01 * ROW[name], "note": name} for name in case.names]
    return Rank(params, KINDS[case.kind](groups, **case.options), rank, ranks)


def start() -> dict[str, torch.Tensor]:
    return {name: torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape) for name, shape in SHAPES.items()}


def trained(case: Case, ranks: int, steps: int = 3) -> list[Rank]:
    every = [make_rank(case, start(), rank, ranks) for rank in range(ranks)]
    for each in every:
        for number in range(steps):
            each.step(case, number)
    return every


def sliced(state_dict: Any, rank: int, ranks: int) -> Any:
    """A rank's part of a whole optimizer's state: rows of what has as many as the parameter."""

    def part(value: Any) -> Any:
        has_rows = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == 12
        return rows(value, rank, ranks) if has_rows else value

    states = {name: {key: part(value) for key, value in own.items()} for name, own in state_dict["state"].items()}
    return {**state_dict, "state": states}


def convert(case: Case, rank: Rank, state_dict: Any) -> Any:
    params = st.optim.get_param_id_to_sharded_param_map(rank.sharded(), rank.optimizer)
    return st.optim.optim_state_to_sharding_state(state_dict, params, rules=case.rules)


def target(case: Case, rank: Rank, storage: st.storage.MemoryStorage) -> Any:
    params = st.optim.get_param_id_to_sharded_param_map(rank.sharded(), rank.optimizer)
    missing = "leave_out" if not any("state" in key for key in st.load_sharded_metadata(storage)) else "refuse"
    return st.optim.abstract_optim_state_from_metadata(
        rank.optimizer.state_dict(), params, st.load_sharded_metadata(storage), rules=case.rules, missing=missing
    )


def saved_and_loaded(case: Case, states: list[Any], save_ranks: list[Rank], load_ranks: list[Rank]) -> list[Any]:
    storage = st.storage.MemoryStorage()
    trees = [convert(case, rank, state) for rank, state in zip(save_ranks, states, strict=True)]
    st.simulate(len(trees), lambda world: st.save({"o": trees[world.rank]}, storage, world=world))

    def load(world: st.World) -> Any:
        tree = {"o": target(case, load_ranks[world.rank], storage)}
        return st.optim.sharding_state_to_optim_state(st.load(tree, storage, world=world)["o"])

    return st.simulate(len(load_ranks), load)


def check_case(case: Case, *, spoil: Callable[[Any], Any] = lambda state: state, ranks: int = 3) -> None:
    [whole] = trained(case, 1)
    weights = {name: param.detach() for name, param in whole.params.items()}
    states = [sliced(whole.optimizer.state_dict(), rank, 4) for rank in range(4)]
    before = [make_rank(case, weights, rank, 4) for rank in range(4)]
    if case.elementwise:
        before = trained(case, 4)
        states = [rank.optimizer.state_dict() for rank in before]
    after = [make_rank(case, weights, rank, ranks) for rank in range(ranks)]
    for rank, found in zip(after, map(spoil, saved_and_loaded(case, states, before, after)), strict=True):
        assert not st.diff(found, sliced(whole.optimizer.state_dict(), rank.rank, ranks)), f"rank {rank.rank}"
        rank.optimizer.load_state_dict(found)
    if case.elementwise or ranks == 1:
        whole.step(case, 3)
        for rank in after:
            rank.step(case, 3)
            for name, param in rank.params.items():
                expected = rows(whole.params[name].detach(), rank.rank, ranks)
                assert bits(param.detach()) == bits(expected), f"{name} on rank {rank.rank}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}{dict(case.options)}")
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_goes_on_as_if_nothing_was(case: Case, ranks: int) -> None:
    check_case(case, ranks=ranks)


def swap_moments(state: Any) -> Any:
    """Two parameters of one shape."""
    one, two = (state["state"][number] for number in (1, 2))
    return {**state, "state": {**state["state"], 1: {**one, "exp_avg": two["exp_avg"]}}}


def swap_groups(state: Any) -> Any:
    groups = state["param_groups"]
    new = [{**groups[1], "params": [0]}, {**groups[0], "params": [1]}, groups[2]]
    return {**state, "param_groups": new}


def lose_a_step(state: Any) -> Any:
    return {**state, "state": {**state["state"], 0: {**state["state"][0], "step": torch.tensor(0.0)}}}


@pytest.mark.parametrize("fault", [swap_moments, swap_groups, lose_a_step])
def test_the_law_catches(fault: Callable[[Any], Any]) -> None:
    with pytest.raises(AssertionError, match="rank 0"):
        check_case(CASES[0], spoil=fault)


def test_lbfgs_gets_a_clear_answer() -> None:
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.LBFGS([param])

    def loss() -> torch.Tensor:
        value = (param**4).sum()
        value.backward()
        return value

    optimizer.step(loss)
    params = {0: st.ShardedTensor.from_rank_offsets("w", param)}
    with pytest.raises(CheckpointingException, match="those of LBFGS, cannot be sharded by parameter") as caught:
        st.optim.optim_state_to_sharding_state(optimizer.state_dict(), params)
    for words in (
        "'old_dirs[0]' of state[0] ('w'): (6,), the parameter has (3, 2)",
        "'d' of state[0] ('w'): (6,), the parameter has (3, 2)",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "rules"),
    [("Adafactor", st.optim.adafactor_rules), ("CAME", st.optim.came_rules)],
    ids=["Adafactor", "CAME"],
)
def test_an_optimizer_of_factors_on_pieces_of_its_own_comes_back_on_as_many_ranks(kind: str, rules: Any) -> None:
    """Each rank reduces its own rows: 4 ranks have 4 column factors, which no other number of ranks can use."""
    case = Case(kind, {"lr": 0.1}, elementwise=False, rules=rules(where_cut="own"))
    every, again = trained(case, 4), trained(case, 4, steps=0)
    states = [rank.optimizer.state_dict() for rank in every]
    for found, state in zip(saved_and_loaded(case, states, every, again), states, strict=True):
        assert not st.diff(found, state)
    with pytest.raises(CheckpointingException, match=r"\(4, 6\)|\(4, 1, 6\)"):
        saved_and_loaded(case, states, every, trained(case, 3, steps=0))


def test_the_factors_of_came_are_refused_without_a_rule_and_the_error_names_what_fits() -> None:
    param = torch.nn.Parameter(torch.ones(64, 256))
    param.grad = torch.ones(64, 256)
    optimizer = CAME([param])
    optimizer.step()
    params = {0: st.ShardedTensor.from_rank_offsets("w", param)}
    with pytest.raises(CheckpointingException, match="`came_rules`") as caught:
        st.optim.optim_state_to_sharding_state(optimizer.state_dict(), params)
    assert "'exp_avg_res_col' of state[0] ('w'): (256,), the parameter has (64, 256)" in str(caught.value)
    state = st.optim.optim_state_to_sharding_state(optimizer.state_dict(), params, rules=st.optim.came_rules())
    factors = {key: leaf.global_shape for key, leaf in state["state"][0].items() if key[-3:] in ("row", "col")}
    rows, columns = ("exp_avg_sq_row", "exp_avg_res_row"), ("exp_avg_sq_col", "exp_avg_res_col")
    assert factors == dict.fromkeys(rows, (64,)) | dict.fromkeys(columns, (256,))


def test_torchs_own_state_dicts_are_those_by_name() -> None:
    """From torch's `get_optimizer_state_dict` to its `set_optimizer_state_dict`, groups in another order."""
    model = torch.nn.Linear(4, 4)
    named = dict(model.named_parameters())
    optimizer, other = (
        torch.optim.AdamW([{"params": [named[name]], "lr": rate} for name, rate in groups])
        for groups in ([("weight", 0.1), ("bias", 0.2)], [("bias", 0.0), ("weight", 0.0)])
    )
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()
    names = st.optim.get_param_id_to_name_map(named.items(), optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    assert not st.diff(state, st.optim.optim_state_by_name(optimizer.state_dict(), names))
    regrouped = st.optim.regroup_optim_state(state, get_optimizer_state_dict(model, other)["param_groups"])
    set_optimizer_state_dict(model, other, regrouped)
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1]
    assert not st.diff(get_optimizer_state_dict(model, other)["state"], state["state"])


def test_a_template_asks_for_the_same_as_the_metadata() -> None:
    case = Case("AdamW")
    every, storage = trained(case, 4), st.storage.MemoryStorage()
    trees = [convert(case, rank, rank.optimizer.state_dict()) for rank in every]
    st.simulate(4, lambda world: st.save({"o": trees[world.rank]}, storage, world=world))
    [fresh] = trained(case, 1, steps=0)
    params = st.optim.get_param_id_to_sharded_param_map(fresh.sharded(), fresh.optimizer)
    template = {"step": torch.tensor(0.0), "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    asked = st.optim.abstract_optim_state(fresh.optimizer.state_dict(), params, template)
    assert not st.diff(asked, target(case, fresh, storage))
    loaded = st.load({"o": asked}, storage)["o"]
    [whole] = trained(case, 1)
    assert not st.diff(loaded, whole.optimizer.state_dict())


def test_a_template_with_a_rule() -> None:
    params = {0: st.ShardedTensor.from_rank_offsets("w", torch.zeros(3, 6), (0, 1, 4))}
    fresh = {"state": {}, "param_groups": [{"params": [0]}]}
    template = {"row_var": lambda shard: torch.empty(*shard.local_shape[:-1], 1, device="meta"), "count": 0}
    state = st.optim.abstract_optim_state(fresh, params, template, rules=st.optim.adafactor_rules())["state"][0]
    assert (state["row_var"].global_shape, state["row_var"].data) == ((12, 1), None)
    assert isinstance(state["count"], st.ShardedObject)
