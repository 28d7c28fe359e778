"""AdamW with TP=2 x DP=2 and ZeRO-1, saved and resumed in other layouts: losses go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.buffers import BufferPlan, flat_shards, flat_targets
from shardtree.lenses import Lens
from shardtree.live import run_processes
from shardtree.mapping import ShardedObject
from shardtree.optim import abstract_optim_state_from_metadata
from shardtree.world import World
from tests.training.place import Layout, Place, joined_place
from tests.training.plain import plain_losses
from tests.training.states import (
    MASTER,
    described,
    differences,
    named_optimizer,
    resume,
    saved_state,
    sharded_model,
    wanted_state,
)
from tests.training.transformer import Config, initial_weights
from tests.training.zero import SEED, Trainer

STEPS = 4  # before the save, and after it
FLOAT, HALF = Config(), Config(tied=True, dtype=torch.bfloat16)

# Layouts add in other orders, which changes a sum of n numbers by about sqrt(n) * 2**-24 of their size: here, where
# n is at most a few hundred, 1e-6. What steps make of that stays below ten times as much.
TOLERANCE = 1e-5
# Gradients in bfloat16 are rounded, by up to 2**-9 of their size, before data-parallel ranks add them.
HALF_TOLERANCE = 5e-3
FAULTY = 100 * TOLERANCE  # what a planted fault exceeds, at the least

Losses = list[float]


@dataclass(frozen=True)
class Run:
    """What came of a run on one rank: losses, what it holds that differs from the checkpoint, and its groups."""

    losses: Losses
    differences: list[str]
    groups: Any


def groups(trainer: Trainer) -> Any:
    return [{key: value for key, value in each.items() if key != "params"} for each in trainer.optimizer.param_groups]


def without_gaps(plan: BufferPlan) -> BufferPlan:
    """Return a plan of the same buckets in which parameters follow one another at once."""
    places, ends = [], dict.fromkeys(range(len(plan.buckets)), 0)
    for place in plan.places:
        first = plan.buckets[place.bucket][0]
        places.append(replace(place, start=first + ends[place.bucket]))
        ends[place.bucket] += place.stop - place.start
    return replace(plan, places=tuple(places))


def train_and_save(world: World, folder: str) -> tuple[Run, Run, Losses]:
    """Return an uninterrupted run's two halves, between which it is saved, and the losses of one in bfloat16."""
    torch.set_num_threads(1)
    place = joined_place(Layout(tp=2, dp=2), world.rank)
    trainer = started(FLOAT, place)
    first = trainer.train(STEPS)
    lenses, plan = described(trainer)
    saves = {
        "sound": saved_state(trainer, lenses, plan),
        "plain rows": saved_state(trainer, without_fused(lenses), plan),
        "no gaps": shifted_state(trainer, lenses, plan),
    }
    for name, tree in saves.items():
        st.save(tree, f"{folder}/{name}", world=world, options=st.SaveOptions(durable=False))
    sound = differences(trainer, st.load_plain_tensors(f"{folder}/sound"))
    before = Run(first, sound, groups(trainer))
    half = started(HALF, place)
    half.train(STEPS)
    st.save(saved_state(half, *described(half)), f"{folder}/half", world=world, options=st.SaveOptions(durable=False))
    return before, Run(trainer.train(STEPS), [], groups(trainer)), half.train(STEPS)


def shifted_state(trainer: Trainer, lenses: Mapping[str, Lens], plan: BufferPlan) -> Any:
    """Return the tree of a rank that takes its buffers for ones without gaps."""
    wrong, model, rank = without_gaps(plan), sharded_model(trainer, lenses), trainer.place.dp_rank
    if rank:  # optimizers that have a tensor for each parameter know how much of it a rank has, and then it's an error
        with pytest.raises(st.errors.TreeError, match=r"are not shaped like their parameters"):
            saved_state(trainer, lenses, wrong)
    masters = flat_shards(wrong, rank, trainer.parts, model, prefix=MASTER)
    return {**saved_state(trainer, lenses, plan), "masters": masters}


def started(config: Config, place: Any) -> Trainer:
    trainer = Trainer(config, place)
    trainer.start(initial_weights(config, SEED))
    return trainer


def without_fused(lenses: Mapping[str, Lens]) -> dict[str, Lens]:
    return {pattern: lens for pattern, lens in lenses.items() if "linear_fc1" not in pattern}


def go_on(world: World, folder: str, layouts: Sequence[Layout]) -> list[tuple[Run, ...]]:
    """Return what comes of the checkpoints, in float32 and in bfloat16, in each layout."""
    torch.set_num_threads(1)
    places = [joined_place(layout, world.rank) for layout in layouts]
    cases = [(FLOAT, f"{folder}/sound"), (HALF, f"{folder}/half")]
    return [tuple(resumed(world, *case, place) for case in cases) for place in places]


def resumed(world: World, config: Config, folder: str, place: Any) -> Run:
    trainer = Trainer(config, place)
    lenses, plan = described(trainer)
    resume(trainer, st.load(wanted_state(trainer, lenses, plan), folder, world=world, strict="raise_all"), plan)
    stored = st.load_plain_tensors(folder)
    wrong, held = differences(trainer, stored), groups(trainer)
    again = f"{folder} again, {place.layout}"
    st.save(saved_state(trainer, lenses, plan), again, world=world, options=st.SaveOptions(durable=False))
    resaved = st.load_plain_tensors(again)
    wrong += [f"{key} saved again" for key in stored.keys() | resaved.keys() if not same_bits(key, stored, resaved)]
    return Run(trainer.train(STEPS), wrong, held)


def same_bits(key: str, *checkpoints: Mapping[str, torch.Tensor]) -> bool:
    one, other = (checkpoint.get(key) for checkpoint in checkpoints)
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def same(loaded: Any) -> Any:
    return loaded


def other_moments(wanted: Any) -> Any:
    """Return a target in which two parameters of the same shape have one another's moments."""
    moments = [f"optimizer.state.{key}.layers.{{}}.mlp.linear_fc2.weight" for key in ("exp_avg", "exp_avg_sq")]
    pairs = {each.format(layer): each.format(1 - layer) for each in moments for layer in range(2)}
    return st.rename(wanted, lambda key: pairs.get(key, key))


def other_rates(loaded: Any) -> Any:
    one, two = loaded["optimizer"]["param_groups"]
    swapped = [{**one, "lr": two["lr"]}, {**two, "lr": one["lr"]}]
    return {**loaded, "optimizer": {**loaded["optimizer"], "param_groups": swapped}}


def first_data(loaded: Any) -> Any:
    return {**loaded, "draw": torch.Generator().manual_seed(SEED).get_state()}


# Checkpoint, what is done to the target, and to what was loaded.
FAULTS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "gate and up as plain rows": ("plain rows", same, same),
    "moments of a parameter of the same shape": ("sound", other_moments, same),
    "learning rate of another group": ("sound", same, other_rates),
    "ranges without the padding": ("no gaps", same, same),
    "data from the beginning": ("sound", same, first_data),
}


def go_on_wrongly(world: World, folder: str) -> dict[str, Run]:
    """Return what comes of each fault, and what differs from the sound checkpoint."""
    place = joined_place(Layout(tp=1, dp=2), world.rank)
    sound, found = st.load_plain_tensors(f"{folder}/sound"), {}
    for name, (checkpoint, change_target, change_loaded) in FAULTS.items():
        trainer = Trainer(FLOAT, place)
        lenses, plan = described(trainer)
        lenses = without_fused(lenses) if checkpoint == "plain rows" else lenses
        target = change_target(wanted_state(trainer, lenses, plan))
        resume(trainer, change_loaded(st.load(target, f"{folder}/{checkpoint}", world=world)), plan)
        wrong, held = differences(trainer, sound), groups(trainer)
        found[name] = Run(trainer.train(STEPS), wrong, held)
    return found


def go_on_both_ways(world: World, folder: str, layouts: Sequence[Layout]) -> tuple[Any, dict[str, Run]]:
    return go_on(world, folder, layouts), go_on_wrongly(world, folder)


def farthest(found: Losses, expected: Losses) -> float:
    """Return the largest relative difference; infinite where a loss is no number."""
    differences = [abs(one - other) / other for one, other in zip(found, expected, strict=True)]
    return max(each if isfinite(each) else inf for each in differences)


def check_same(found: Losses, expected: Losses, tolerance: float = TOLERANCE) -> None:
    assert farthest(found, expected) <= tolerance, f"losses {found}, expected {expected}"


def test_losses_that_are_no_numbers_are_not_the_same() -> None:
    for found in ([1.0, float("nan")], [float("nan"), 1.0], [1.0, inf]):
        with pytest.raises(AssertionError, match="losses"):
            check_same(found, [1.0, 1.0])


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_what_a_plain_one_is(tied: bool) -> None:
    config = Config(tied=tied)
    found = started(config, joined_place(Layout(1, 1), 0)).train(2 * STEPS)
    expected = plain_losses(config, initial_weights(config, SEED), 2 * STEPS, torch.Generator().manual_seed(SEED))
    check_same(found, expected)
    assert found[-1] < found[0] - 0.5, "something is learned"


@pytest.mark.slow
def test_a_checkpoint_says_what_a_fresh_optimizer_wants() -> None:
    trainer = started(FLOAT, joined_place(Layout(1, 1), 0))
    trainer.train(1)
    checkpoint = st.storage.MemoryStorage()
    st.save(saved_state(trainer, *described(trainer)), checkpoint)
    stored = st.load_sharded_metadata(checkpoint)
    for rank in range(4):  # the last one has nothing but padding of the vocabulary
        fresh = Trainer(FLOAT, Place(Layout(tp=4, dp=1), rank, 0))
        lenses, plan = described(fresh)
        pieces, (_, state) = flat_targets(plan, 0, sharded_model(fresh, lenses)), named_optimizer(fresh)
        told = abstract_optim_state_from_metadata(state, pieces, stored, exclude_keys="fp32_param")
        expected = wanted_state(fresh, lenses, plan)["optimizer"]
        assert wanted(told) == wanted(expected)
        assert len(wanted(told)) > 50
        less = {key: leaf for key, leaf in stored.items() if key != "optimizer.state.exp_avg.position.weight"}
        told = abstract_optim_state_from_metadata(state, pieces, less, exclude_keys="fp32_param")
        assert wanted(told) < wanted(expected), "the planted fault: a state that is not stored"


def wanted(tree: Any) -> set[Any]:
    """Return what a target asks for."""
    leaves = [leaf for _, leaf in st.trees.leaves_with_paths(st.apply_factories(tree))]
    return {(leaf.key, leaf.local_shape, leaf.global_offset) for leaf in leaves if isinstance(leaf, st.ShardedTensor)}


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_run_goes_on_with_the_same_losses_in_other_layouts(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks = run_processes(4, partial(train_and_save, folder=folder))
    before, after, half = ranks[0]
    assert all(run == ranks[0] for run in ranks), "all ranks have the same losses, and held what was stored"
    assert before.differences == []

    four = [Layout(tp=2, dp=2), Layout(tp=4, dp=1), Layout(tp=1, dp=4)]
    two = [Layout(tp=1, dp=2), Layout(tp=2, dp=1)]
    on_four = run_processes(4, partial(go_on, folder=folder, layouts=four))
    on_two = run_processes(2, partial(go_on_both_ways, folder=folder, layouts=two))
    alone = go_on(st.world.current_world(), folder, [Layout(1, 1)])

    again, again_half = on_four[0][0]
    assert (again.losses, again_half.losses) == (after.losses, half), "bit for bit in the same layout"
    for runs in (*on_four, *(each for each, _ in on_two), alone):
        for run, run_half in runs:
            assert (run.differences, run_half.differences) == ([], [])
            assert run.groups == before.groups
            check_same(run.losses, after.losses)
            check_same(run_half.losses, half, HALF_TOLERANCE)
    check_plain_one(folder, before.losses, after.losses)

    for name, run in on_two[0][1].items():
        assert farthest(run.losses, after.losses) > FAULTY, f"not caught: {name}"
        with pytest.raises(AssertionError, match="losses"):
            check_same(run.losses, after.losses)
    seen = {
        name for _, faulty in on_two for name, run in faulty.items() if run.differences or run.groups != before.groups
    }
    assert seen == FAULTS.keys() - {"data from the beginning"}, "what is loaded wrongly shows at once, too"


def check_plain_one(folder: str, before: Losses, after: Losses) -> None:
    """Check that a model that knows no layouts has the same losses, from the beginning and from the checkpoint."""
    weights = initial_weights(FLOAT, SEED)
    check_same(plain_losses(FLOAT, weights, 2 * STEPS, torch.Generator().manual_seed(SEED)), before + after)
    stored = st.load_plain_tensors(f"{folder}/sound")
    states = {
        key: {name: stored[f"optimizer.state.{key}.{name}"] for name in weights}
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    masters = {name: stored[f"{MASTER}.{name}"] for name in weights}
    draw = st.load({"draw": ShardedObject("draw", None, (1,), (0,))}, f"{folder}/sound")["draw"]
    generator = torch.Generator()
    generator.set_state(draw)
    check_same(plain_losses(FLOAT, masters, STEPS, generator, states, STEPS), after)
