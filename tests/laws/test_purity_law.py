"""No public function of the pure packages changes an argument: each is watched in the examples of its docstring.

Public is what a room's `__all__` names, and the root. What has no examples has a call here; a new one must get either.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree import buffers, layouts, lenses, meshes, objects, optim, plans, traces
from shardtree.core import fingerprints, lazy, mapping
from shardtree.core.plans import find_unexpected
from shardtree.testing import check_pure, glu, random_bits

PURE = {
    "lazy": ("core.lazy",),
    "mapping": ("core.mapping",),
    "trees": ("core.trees", *(f"transforms.{module}" for module in ("_at", "_by_key", "_params"))),
    "objects": ("core.layouts._object", "transforms._object_rules"),
    "layouts": ("core.layouts", "live.resharding", "meshes"),
    "lenses": ("lenses",),
    "buffers": ("optim.buffers",),
    "optim": ("optim",),
    "transforms": ("transforms",),
    "plans": ("core.plans", "inspection._explained", "live.resharding"),
    "fingerprints": ("core.fingerprints",),
    "retention": ("series.policies",),
    "pictures": ("pictures",),
    "traces": ("traces",),
}
"""Public rooms, and the modules below shardtree that hold what is theirs."""

WEIGHT = st.ShardedTensor.from_rank_offsets("w", torch.arange(8.0).view(4, 2), (0, 1, 2))
FLAT = st.ShardedTensor.from_rank_offsets_flat("f", torch.arange(5.0), (4, 2), flattened_range=slice(2, 7))
OBJECT = st.ShardedObject("rng", {"seed": [1, 2]}, (2,), (1,))
FACTORY = glu("g", torch.arange(8.0).view(4, 2))
LOCAL = st.LocalNonpersistentObject([1])
COLUMNS = layouts.shard_columns([WEIGHT, FLAT, replace(WEIGHT, replica_id=1)])
ARRAY = objects.ObjectArray("rng", (2,), ([1, 2], [3]))
WHOLE = st.ShardedTensor.from_rank_offsets("w", torch.arange(8.0).view(4, 2))
RESHARD = st.plan_reshard([{"w": WHOLE}], [{}, {"w": WHOLE}])
TRACED = traces.trace(lambda given: {"w": given["w"].T.reshape(4, 2)}, {"w": WEIGHT.data})
LAZY = lazy.stored(lambda offset, shape: torch.full(shape, 7.0), (4, 2), torch.float32, name="w")
MESH, SPEC = layouts.Mesh(dp=2, tp=2), layouts.PartitionSpec((meshes.AxisSplit("dp", 2), meshes.AxisSplit("tp")))
BUFFERS = buffers.plan_buffers({"w": WEIGHT}, data_parallel=3)
STATE = optim.OptimizerState.of(torch.ones(3))

CALLS: dict[str, tuple[Any, ...]] = {
    "mapping.ShardedBase.validate_metadata_integrity": (mapping.ShardedTensor.validate_metadata_integrity, WEIGHT),
    "mapping.ShardedBase.without_data": (mapping.ShardedTensor.without_data, WEIGHT),
    "mapping.ShardedTensor.validate_metadata_integrity": (mapping.ShardedTensor.validate_metadata_integrity, FLAT),
    "mapping.ShardedTensor.without_data": (st.ShardedTensor.without_data, FLAT),
    "mapping.ShardedObject.validate_metadata_integrity": (st.ShardedObject.validate_metadata_integrity, OBJECT),
    "mapping.ShardedObject.without_data": (st.ShardedObject.without_data, OBJECT),
    "mapping.ShardedTensorFactory.validate_metadata_integrity": (FACTORY.validate_metadata_integrity,),
    "mapping.ShardedTensorFactory.build": (st.ShardedTensorFactory.build, FACTORY),
    "mapping.ShardedTensorFactory.without_data": (st.ShardedTensorFactory.without_data, FACTORY),
    "mapping.LocalNonpersistentObject.unwrap": (st.LocalNonpersistentObject.unwrap, LOCAL),
    "lazy.LazyTensor.read": (LAZY.read,),
    "lazy.LazyTensor.read_box": (LAZY.read_box, (0, 0), (1, 2)),
    "lazy.LazyTensor.box_fetches": (lambda: list(LAZY.box_fetches((0, 0), (1, 2))),),
    "layouts.Mesh.coordinates": (MESH.coordinates, 3),
    "layouts.Mesh.rank_at": (lambda mesh: mesh.rank_at(dp=1, tp=0), MESH),
    "objects.ObjectArray.cell_text": (ARRAY.cell_text, 1),
    "traces.Trace.reads": (TRACED.reads,),
    "traces.Trace.then": (TRACED.then, TRACED),
    "traces.Trace.diff": (TRACED.diff, TRACED),
    "traces.Moves.near": (TRACED.moves["w"].near, 0, 3),
    "optim.OptimizerState.of": (optim.OptimizerState.of, torch.ones(3)),
    "optim.OptimizerState.axes": (STATE.axes, 0),
    "optim.OptimizerState.own_sizes": (STATE.own_sizes, 0),
    "plans.ReshardPlan.leaving": (plans.ReshardPlan.leaving, RESHARD, [0]),
    "plans.ReshardPlan.schedule": (plans.ReshardPlan.schedule, RESHARD),
    "plans.ReshardPlan.check": (plans.ReshardPlan.check, RESHARD),
    "plans.ReshardPlan.explain": (plans.ReshardPlan.explain, RESHARD, "w"),
    "plans.ReshardPlan.inverse": (plans.ReshardPlan.inverse, RESHARD),
    "plans.ReshardPlan.from_json": (plans.ReshardPlan.from_json, RESHARD.to_json()),
    "fingerprints.add_fingerprints": (fingerprints.add_fingerprints, [fingerprints.partial_fingerprints([WHOLE])]),
}
"""What has no examples of its own, and arguments."""

VALUES: dict[str, Any] = {
    "traces.Kind": TRACED.outputs["w"],
    "traces.Move": TRACED.moves["w"][0],
    "traces.Moves": TRACED.moves["w"],
    "layouts.Mesh": MESH,
    "layouts.P": SPEC,
    "layouts.PartitionSpec": SPEC,
    "layouts.RankShard": layouts.mesh_shards((8, 2), MESH, SPEC)[1],
    "layouts.Coverage": layouts.coverage([{"w": WEIGHT}]),
    "buffers.BufferPlan": BUFFERS,
    "buffers.BufferPlace": BUFFERS.places[0],
    "lenses.AxisRuns": lenses.joined_parts(lenses.grouped_runs(8, 2, (1, 3))),
    "trees.WorstElement": st.trees.diff(1.0, 2.0, atol=0.5).errors[0],
    "lazy.LazyTensor": LAZY,
    "mapping.ShardedTensor": WEIGHT,
    "mapping.ShardedObject": OBJECT,
    "layouts.ShardColumns": COLUMNS,
    "objects.ObjectArray": ARRAY,
    "plans.ReshardPlan": RESHARD,
    "plans.Schedule": RESHARD.schedule(),
    "plans.Provenance": RESHARD.explain("w"),
    "plans.ReadCost": plans.ReadCost(1, 2, 1, 1),
    "plans.Unexpected": find_unexpected(["m.v", "m.w"], ["v", "w"])[0],
    "objects.ShapeChange": objects.ShapeChange("rng", ((1, 2),), (1, 1)),
    "layouts.Problem": layouts.Problem("w", (0,), "is held twice"),
    "plans.FailedCheck": plans.FailedCheck((0,), st.errors.ShapeError, "not a shape"),
    "plans.Gap": plans.Gap("w", (0, 2), 3, 4),
    "plans.Mismatch": plans.Mismatch(
        "w", layouts.TensorKind(torch.int8, (2,), 0), layouts.TensorKind(torch.int8, (3,), 0)
    ),
    "plans.Refusal": plans.Refusal("w", "it is sparse"),
    "plans.ScaledValues": plans.ScaledValues("w", torch.float8_e4m3fn, ("w_scale",)),
    "plans.Undecided": plans.Undecided("w", "a pickle"),
    "traces.Difference": traces.Difference("w", 2, "a", "b"),
    "traces.Problem": traces.Problem("unused", "w", 2, "[0:2]"),
    "plans.Explanation": plans.Explanation(("v",), (), (plans.RankReads(0, 1, 0, plans.ReadCost(1, 2, 1, 1)),)),
}


def public(package: str) -> dict[str, Any]:
    """Return what users call of a package: its functions, and the methods and properties of its classes."""
    found: dict[str, Any] = {}
    room = importlib.import_module(f"shardtree.{package}")
    for name in sorted({*vars(room), *getattr(room, "__all__", ())}):
        value = getattr(room, name)
        # What one room has for another is held by what users call.
        named = name in getattr(room, "__all__", ()) or getattr(st, name, None) is value
        homes = tuple(f"shardtree.{home}" for home in PURE[package])
        if not named or not str(getattr(value, "__module__", "")).startswith(homes):
            continue
        if inspect.isfunction(value):
            found[f"{package}.{name}"] = value
        elif inspect.isclass(value) and not getattr(value, "_is_protocol", False):
            members = vars(value).items()
            found |= {f"{package}.{name}.{member}": own for member, own in members if not member.startswith("_")}
    callables = (property, classmethod, staticmethod)
    return {name: value for name, value in found.items() if inspect.isfunction(value) or isinstance(value, callables)}


PUBLIC = {name: value for package in PURE for name, value in public(package).items()}
FUNCTIONS = {name for name, value in PUBLIC.items() if not isinstance(value, property)}
PROPERTIES = [name for name in PUBLIC if name not in FUNCTIONS]


def watched(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """Return the function, each call of which is held to the law, as are calls of functions that it returns."""

    @wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        results: list[Any] = []

        def compared(*args: Any, **options: Any) -> Any:
            results.append(function(*args, **options))
            return results[-1].shape if isinstance(results[-1], lazy.LazyTensor) else results[-1]

        compared.__name__ = function.__name__
        check_pure(compared, *(list(each) if isinstance(each, Iterator) else each for each in given), **options)
        calls.append(results[0])
        return watched(results[0], calls) if inspect.isfunction(results[0]) else results[0]

    return call


def run_examples(name: str, value: Any, fault: Callable[..., Any] | None = None) -> int:
    """Run the examples of a public function, watched wherever they find it; return how often they called it."""
    own = getattr(value, "__func__", value)
    calls: list[Any] = []
    function = watched(fault or own, calls)
    package, *kind, member = name.split(".")
    room = importlib.import_module(f"shardtree.{package}")
    written = inspect.unwrap(own)
    known = {**written.__globals__, **({} if kind else {member: function})}
    with pytest.MonkeyPatch.context() as patch:
        if kind:
            bound = isinstance(value, (classmethod, staticmethod))
            patch.setattr(getattr(room, kind[0]), member, type(value)(function) if bound else function)
        for place in () if kind else (st, room):
            if vars(place).get(member) is value:
                patch.setattr(place, member, function)
        for test in doctest.DocTestFinder(recurse=False).find(written, name, module=False, globs=known):
            try:
                doctest.DebugRunner(optionflags=doctest.ELLIPSIS).run(test)
            except doctest.UnexpectedException as unexpected:
                raise unexpected.exc_info[1] from None
    return len(calls)


def has_examples(name: str) -> bool:
    return ">>>" in (inspect.unwrap(getattr(PUBLIC[name], "__func__", PUBLIC[name])).__doc__ or "")


def without_a_call(functions: set[str]) -> set[str]:
    return {name for name in functions - CALLS.keys() if name not in PUBLIC or not has_examples(name)}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_no_public_function_changes_an_argument(name: str) -> None:
    if name in CALLS:
        function, *args = CALLS[name]
        check_pure(function, *args)
    else:
        assert run_examples(name, PUBLIC[name]), "give it examples, or a call in CALLS"


@pytest.mark.parametrize("name", PROPERTIES)
def test_no_property_changes_its_value(name: str) -> None:
    package, kind, member = name.split(".")
    value = VALUES.get(f"{package}.{kind}", LAZY if kind == "Source" else None)
    assert value is not None, f"{name}: give VALUES a value of {package}.{kind}"
    if member in {"T", "mT"}:
        assert getattr(value, member).shape == value.shape[::-1]
    else:
        check_pure(lambda value: getattr(value, member), value)


def test_every_public_function_has_a_call() -> None:
    assert without_a_call(FUNCTIONS) == set(), "give them examples, or calls in CALLS"
    assert CALLS.keys() - FUNCTIONS == set(), "these are not public any more"


def test_a_function_without_a_call_is_found() -> None:
    assert without_a_call({*FUNCTIONS, "trees.new"}) == {"trees.new"}


def test_the_law_catches_a_function_that_changes_an_argument_in_its_examples() -> None:
    def overwriting(left: Any, right: Any) -> Any:
        left.update(right)
        return left

    with pytest.raises(AssertionError, match=r"overwriting changed its argument 0"):
        run_examples("trees.merge", st.trees.merge, overwriting)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda tree: tree["model"].pop("f"), r"argument\['model'\]"),
        (lambda tree: tree["model"]["f"].append(1), r"argument\['model'\]\['f'\]\[2\]"),
        (lambda tree: tree["model"].update(w=WEIGHT.without_data()), r"argument\['model'\]\['w'\]"),
        (lambda tree: tree["model"].update({"w": tree["model"].pop("w")}), "argument"),
        (lambda tree: tree["t"].add_(0), r"argument\['t'\]"),
        (lambda tree: tree["t"].numpy().fill(3), "a value inside it"),
        (lambda tree: tree["n"].fill(3), "a value inside it"),
        (lambda tree, count=[0]: count.append(1) or len(count), "returned another value"),
    ],
)
def test_the_checker_catches(fault: Callable[[Any], Any], message: str) -> None:
    tree = {"model": {"w": WEIGHT, "f": [FLAT, None]}, "t": random_bits((3,), torch.float32), "n": np.zeros(2)}
    with pytest.raises(AssertionError, match=message):
        check_pure(fault, tree)
