"""Which parameter is which where values are equal: by the layers and cuts around it, and by the order of modules."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import NamedTuple

from ...errors import UnsupportedValue, error_text, shorten
from ._buckets import MOST_READINGS, Bucket, BucketPiece, Candidate, Reading, Unit, may_be_gated

logger = logging.getLogger("shardtree")

# Where a parameter stands in a model: by its key, and by the layer, which is a prepended axis or a part of the key


class ParameterPlace(NamedTuple):
    """A parameter's place in the order of `named_parameters()`; places compare as they follow each other.

    Attributes:
        section: embeddings, layers, what follows them, the output; or the place among the names that the caller gave.
        layer: number of the layer, -1 outside of layers.
        module: place among the layer's modules.
        rest: the expert, say.
    """

    section: int
    layer: int
    module: int
    rest: tuple[int, ...]


_LAYER = re.compile(r"(?P<before>.*\blayers)\.(?:(?P<number>\d{1,18})\.)?(?P<inside>.*)", re.DOTALL)

_NORM = "layer_norm_(?:weight|bias)"
_ATTENTION = (
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    *("q_layernorm", "k_layernorm", "kv_layernorm"),
)

# Names can't be required in place of this order: norms, which begin with equal weights, need it in every release's own
# checkpoints, and a conversion on the command line has neither names nor a model. Names alone wouldn't do either: they
# don't say which tensor-parallel rank's part a bucket has, which its values do.
# Megatron-Core registers a layer's modules in this order. A fused norm is stored under one key by both of its layer
# specifications, but is a module before the attention in one, and the first parameter of linear_qkv in the other.
_LOCAL = (
    rf"self_attention\.linear_qkv\.{_NORM}|input_layernorm\..*",
    r"self_attention\.linear_proj\..*",
    r"self_attention\.linear_qkv\.(?!layer_norm_).*",
    *(rf"self_attention\.{name}\..*" for name in _ATTENTION),
    rf"mlp\.linear_fc1\.{_NORM}|pre_mlp_layernorm\..*",
    r"mlp\.router\..*",
    r"mlp\.experts\..*linear_fc1\..*",
    r"mlp\.experts\..*linear_fc2\..*",
    r"mlp\.linear_fc1\.(?!layer_norm_).*",
    r"mlp\.linear_fc2\..*",
    r"mlp\.shared_experts\.linear_fc1\..*",
    r"mlp\.shared_experts\.linear_fc2\..*",
)
_FUSED = (_LOCAL[1], _LOCAL[0], *_LOCAL[2:])
_SECTIONS = (r".*embedding.*", r".*\blayers\..*", r".*final_(?:layer)?norm.*", r"output_layer\..*")
_ENDINGS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")


@dataclass(frozen=True, slots=True)
class Order:
    """An order of modules.

    Attributes:
        modules: patterns of keys inside a layer, in order; none if the names are given.
        names: the parameters' names in order, as the caller gave them, with their places.
    """

    modules: tuple[str, ...] = ()
    names: Mapping[str, int] | None = None

    def place(self, piece: BucketPiece) -> ParameterPlace | None:
        """Return a parameter's place, None where this order doesn't have it."""
        layer, inside = layer_of(piece)
        if self.names is not None:
            number = self.names.get(full_name(piece))
            return None if number is None else ParameterPlace(number, -1 if layer is None else layer, 0, ())
        section = _first_match(_SECTIONS, piece.key)
        if section is None or layer is None:
            return None if section is None or section == 1 else ParameterPlace(section, -1, _ending(piece.key), ())
        module = _first_match(self.modules, inside)
        return None if module is None else ParameterPlace(1, layer, module * 4 + _ending(piece.key), piece.offset[1:])


def known_orders(parameter_names: Sequence[str] | None) -> tuple[Order, ...]:
    """Return the orders that a model's modules may have; the caller's names alone, if there are any."""
    if parameter_names is not None:
        return (Order(names={name: number for number, name in enumerate(parameter_names)}),)
    return Order(_LOCAL), Order(_FUSED)


def layer_of(piece: BucketPiece) -> tuple[int | None, str]:
    """Return the number of the layer that a parameter belongs to, None outside of layers, and its name in there.

    Examples:
        >>> layer_of(BucketPiece("decoder.layers.mlp.linear_fc2.bias", (3, 0), (1, 16), (4, 16)))
        (3, 'mlp.linear_fc2.bias')
        >>> layer_of(BucketPiece("decoder.layers.7.mlp.linear_fc2.bias", (0,), (16,), (16,)))
        (7, 'mlp.linear_fc2.bias')
    """
    match = _LAYER.fullmatch(piece.key)
    if match is None:
        return None, piece.key
    return (next(iter(piece.offset), 0) if match["number"] is None else int(match["number"])), match["inside"]


def full_name(piece: BucketPiece) -> str:
    """Return a parameter's name with the number of its layer in it.

    Examples:
        >>> full_name(BucketPiece("decoder.layers.mlp.linear_fc2.bias", (3, 0), (1, 16), (4, 16)))
        'decoder.layers.3.mlp.linear_fc2.bias'
    """
    match, (layer, inside) = _LAYER.fullmatch(piece.key), layer_of(piece)
    return piece.key if match is None else f"{match['before']}.{layer}.{inside}"


def _first_match(patterns: Sequence[str], text: str) -> int | None:
    return next((number for number, pattern in enumerate(patterns) if re.fullmatch(pattern, text, re.DOTALL)), None)


def _ending(key: str) -> int:
    return next((number for number, ending in enumerate(_ENDINGS) if key.endswith(ending)), len(_ENDINGS))


# Deciding between readings of a bucket, where equal values go on across a slice's end


def choose(readings: Sequence[Sequence[Reading]], orders: Sequence[Order]) -> list[Unit]:
    """Return the parameters of all buckets, in order.

    Args:
        readings: the ways to read each bucket.
        orders: that modules may have; readings that fit none don't count, where another one fits.

    Raises:
        UnsupportedValue: several ways to read a bucket fit.
    """
    sure = {unit.candidates[0] for each in readings for unit in set(each[0]).intersection(*each[1:]) if _is_one(unit)}
    # All layers of a model are gated, or none is.
    counts = {len(pieces) for pieces in sure if may_be_gated(pieces[0])}
    units: list[Unit] = []
    for each in readings:
        left = [reading for reading in each if len(each) == 1 or all(_has_form(unit, counts) for unit in reading)]
        fitting = [reading for reading in left if any(_descends(reading, order) for order in orders)]
        left = fitting or left
        if len({tuple(_pieces_of(reading)) for reading in left}) != 1 or len(each) == MOST_READINGS:
            raise _unclear({unit for reading in left or each for unit in reading}, orders)
        units += left[0]
    return units


def _pieces_of(reading: Reading) -> Iterator[Hashable]:
    """Yield what is where by a reading: where a slice ends between a pair's halves, these may be read one by one."""
    for unit in reading:
        pieces = unit.candidates[0] if _is_one(unit) else (unit.candidates,)
        each = (unit.end - unit.begin) // len(pieces)
        yield from ((unit.begin + number * each, piece) for number, piece in enumerate(pieces))


def _is_one(unit: Unit) -> bool:
    return len(unit.candidates) == 1


def _has_form(unit: Unit, counts: set[int]) -> bool:
    """Return whether a parameter may be something else than a gated layer that isn't so, or the other way round."""
    return any(len(counts) != 1 or not may_be_gated(pieces[0]) or len(pieces) in counts for pieces in unit.candidates)


def _descends(reading: Reading, order: Order) -> bool:
    """Return whether the parameters of a reading can follow each other in the reverse of an order."""
    last: ParameterPlace | None = None
    for unit in reading:
        places = [order.place(pieces[0]) for pieces in unit.candidates]
        known_places = [place for place in places if place is not None]
        if len(known_places) < len(places) and order.names is None:
            continue  # it may be a module that the order doesn't have
        if _may_be_copy(unit):
            continue
        below = [place for place in known_places if last is None or place < last]
        if not below:
            return False
        last = max(below)
    return True


def _may_be_copy(unit: Unit) -> bool:
    """Return whether a parameter's place may say nothing: a tied embedding's copy stands where the output would."""
    return any(_first_match(_SECTIONS, pieces[0].key) == 0 for pieces in unit.candidates)


# Deciding between candidates with equal values


@dataclass(frozen=True, slots=True)
class Match:
    """A parameter of a bucket, and what it is.

    Attributes:
        bucket: that it lies in.
        begin: First element in the bucket.
        end: one past its last one.
        pieces: Chunks of the model that it holds, one after the other.
    """

    bucket: Bucket
    begin: int
    end: int
    pieces: Candidate


def decide(
    groups: Sequence[Sequence[Unit]], orders: Sequence[Order], states: Callable[[Unit], Hashable]
) -> list[Match]:
    """Return the identity of each parameter of each model-parallel rank.

    Args:
        groups: the parameters of each rank, in the order of its buckets.
        orders: the orders that modules may have; those that contradict the parameters with unique values don't count.
        states: returns what is equal where all stored states of two parameters are; called only in doubt.

    Raises:
        UnsupportedValue: several parameters may be swapped with each other, and their states differ.
    """
    groups = [_of_one_cut(units) for units in groups]
    answers = [_answers(units, orders) for units in groups]
    candidates: dict[Unit, Candidate] = {}
    if any(len(each) != 1 for each in answers):
        candidates = _settled_by_states([unit for units in groups for unit in units], states)
        groups = [[unit for unit in units if unit not in candidates] for units in groups]
        answers = [_answers(units, orders) for units in groups]
    for units, each in zip(groups, answers, strict=True):
        if len(each) != 1:
            raise _unclear(units, orders)
        candidates.update(zip(units, each.pop(), strict=True))
    _warn_of_order([unit for units in groups for unit in units], orders)
    return [Match(*unit[:3], pieces) for unit, pieces in candidates.items()]


def _warn_of_order(units: Sequence[Unit], orders: Sequence[Order]) -> None:
    """Warn if the order of Megatron-Core's own modules alone decided which moments are whose."""
    unsure = {full_name(piece) for unit in units if not _is_one(unit) for each in unit.candidates for piece in each}
    if unsure and all(order.names is None for order in orders):
        logger.warning(
            "load: %s have equal weights; which moments are whose follows from the order in which Megatron-Core's "
            "layers register their modules. Pass parameter_names= if layers of yours register them in another order.",
            ", ".join(shorten(map(repr, sorted(unsure)), shown=5)),
        )


def _answers(units: Sequence[Unit], orders: Sequence[Order]) -> set[tuple[Candidate, ...]]:
    return {tuple(answer) for order in orders if (answer := _in_order(units, order)) is not None}


def _unclear(units: Collection[Unit], orders: Sequence[Order]) -> UnsupportedValue:
    unclear = sorted(
        {full_name(piece) for unit in units if not _is_one(unit) for each in unit.candidates for piece in each}
    )
    group = next(iter(units)).bucket.group
    what = f"open: parameters of {group!r} have equal weights, and nothing tells their moments apart"
    fix = "Pass parameter_names=, the names in the order of the model's named_parameters(), with layers' numbers."
    if any(order.names is not None for order in orders):
        fix = (
            "Leave frozen parameters out of parameter_names=; if that doesn't help, load a checkpoint of a later step."
        )
    return UnsupportedValue(error_text(what, offenders=unclear, fix=fix))


def _settled_by_states(units: Sequence[Unit], states: Callable[[Unit], Hashable]) -> dict[Unit, Candidate]:
    """Return candidates of units whose states are equal as well: any order of these is right.

    Only where each candidate must be one of them: each rank has as many such units as there are candidates, or all
    ranks together have, and none of their pieces may be anything else.
    """
    alike: dict[frozenset[Candidate], list[Unit]] = defaultdict(list)
    for unit in units:
        alike[frozenset(unit.candidates)].append(unit)
    uses = Counter(piece for candidates in alike for pieces in candidates for piece in pieces)
    choices: dict[Unit, Candidate] = {}
    for candidates, same in alike.items():
        counts = {*Counter(unit.bucket.group for unit in same).values(), len(candidates)}
        complete = len(counts) == 1 or len(same) == len(candidates)
        apart = all(uses[piece] == 1 for pieces in candidates for piece in pieces)
        if len(candidates) > 1 and complete and apart and len({states(unit) for unit in same}) == 1:
            choices.update(zip(same, cycle(sorted(candidates)), strict=False))
    return choices


def _of_one_cut(units: Sequence[Unit]) -> list[Unit]:
    """Return the units without candidates of another tensor-parallel rank, as the unique ones tell which that is."""
    numbers_by_count: dict[int, set[int]] = defaultdict(set)
    for unit in units:
        if len(unit.candidates) == 1:
            for count, number in _cuts(unit.candidates[0]):
                numbers_by_count[count].add(number)
    own_numbers = {count: numbers for count, numbers in numbers_by_count.items() if len(numbers) == 1}
    return [unit._replace(candidates=tuple(_fitting(unit.candidates, own_numbers))) for unit in units]


def _fitting(candidates: Sequence[Candidate], own_numbers: Mapping[int, set[int]]) -> Iterator[Candidate]:
    for candidate in candidates:
        if all(number in own_numbers.get(count, {number}) for count, number in _cuts(candidate)):
            yield candidate


def _cuts(candidate: Candidate) -> Iterator[tuple[int, int]]:
    """Yield into how many equal pieces each axis is cut, and which of them a rank has; not for the axis of layers."""
    first = candidate[0]
    axes = zip(first.offset, first.shape, first.global_shape, strict=True)
    layers = re.search(r"\blayers\.(?!\d)", first.key) is not None
    for at, size, whole in list(axes)[int(layers) :]:
        if size and size < whole and whole % (size * len(candidate)) == 0 and at % size == 0:
            yield whole // (size * len(candidate)), at // size


def _in_order(units: Sequence[Unit], order: Order) -> list[Candidate] | None:
    """Return a candidate for each unit in reverse order in each buffer; None unless there is just one way."""
    answer: list[Candidate | None] = [unit.candidates[0] if len(unit.candidates) == 1 else None for unit in units]
    chosen_pieces = {pieces for pieces in answer if pieces is not None}
    if len(chosen_pieces) < sum(pieces is not None for pieces in answer) or not all(unit.candidates for unit in units):
        return None  # a tensor can't be in a rank's optimizer twice
    for _, rows in groupby(range(len(units)), key=lambda row: units[row].bucket.buffer):
        for run, above, below in _runs(list(rows), units, order):
            pool = {pieces for row in run for pieces in units[row].candidates} - chosen_pieces
            if order.names is None and any(order.place(pieces[0]) is None for pieces in pool):
                return None  # a module that this order doesn't have may stand anywhere
            between = {pieces: _between(order.place(pieces[0]), above, below) for pieces in pool}
            places = sorted(((place, pieces) for pieces, place in between.items() if place is not None), reverse=True)
            if len(places) != len(run):
                return None
            for row, (_, pieces) in zip(run, places, strict=True):
                if pieces not in units[row].candidates:
                    return None
                answer[row] = pieces
                chosen_pieces.add(pieces)
    return [pieces for pieces in answer if pieces is not None]


def _runs(
    rows: Sequence[int], units: Sequence[Unit], order: Order
) -> Iterator[tuple[list[int], ParameterPlace | None, ParameterPlace | None]]:
    """Yield the undecided units between two unique ones, with the places of these; a buffer is in reverse order."""
    run: list[int] = []
    above: ParameterPlace | None = None
    for row in rows:
        if len(units[row].candidates) > 1:
            run.append(row)
            continue
        place = order.place(units[row].candidates[0][0])
        if place is None or _may_be_copy(units[row]):
            continue
        if run:
            yield run, above, place
        run, above = [], place
    if run:
        yield run, above, None


def _between(
    place: ParameterPlace | None, above: ParameterPlace | None, below: ParameterPlace | None
) -> ParameterPlace | None:
    """Return a place that lies between two others, and in a layer of one of them or in none; else None."""
    bounds = [bound for bound in (above, below) if bound is not None]
    if place is None or (above is not None and place > above) or (below is not None and place < below):
        return None
    # Layers between those of the bounds are in another buffer, where a rank has several stages of the pipeline.
    near = place.layer < 0 or not bounds or any(bound.layer == place.layer for bound in bounds)
    return place if near else None
