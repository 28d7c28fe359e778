"""Choice of the model's chunk for each parameter in a bucket, if several chunks have the parameter's values.

A `Reading` is a possible division of a bucket into units. A `Unit` is the range of one parameter, with its candidates:
all chunks of the model with these values. Other layers, the rank's other parameters and the module order decide.
"""

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

# This section finds a parameter's place in a model: by its key, and by the layer, a prepended axis or part of the key.


class ParameterPlace(NamedTuple):
    """A parameter's place in the order of `named_parameters()`; an earlier place compares as smaller.

    Attributes:
        section: Index of the section (embeddings, layers, final norm, output), or of the name in `parameter_names`.
        layer: Number of the layer, -1 outside of layers.
        module: Number of the module in the layer.
        rest: Further indices, such as the expert's.
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

# The caller's names can't replace this order: norms, which begin with equal weights, need it in every release's
# checkpoints, and a conversion on the command line has neither names nor a model. Names alone don't suffice: they don't
# say which tensor-parallel rank's part a bucket has, but its values do.
# Megatron-Core registers a layer's modules in this order. Both of its layer specifications store a fused norm under one
# key, but it is a module before the attention in one, and the first parameter of linear_qkv in the other.
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
    """An order of a model's parameters: by patterns of their names in a layer, or by the option `parameter_names`.

    Attributes:
        modules: Patterns of parameters' names inside a layer, in order; empty if `names` is given.
        names: Index of each name in `parameter_names`; None if the option isn't given.
    """

    modules: tuple[str, ...] = ()
    names: Mapping[str, int] | None = None

    def place(self, piece: BucketPiece) -> ParameterPlace | None:
        """Return a parameter's place in this order; None if the order does not include the parameter."""
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
    """Return the possible orders of a model's modules: the order of the caller's names, or Megatron-Core's two."""
    if parameter_names is not None:
        return (Order(names={name: number for number, name in enumerate(parameter_names)}),)
    return Order(_LOCAL), Order(_FUSED)


def layer_of(piece: BucketPiece) -> tuple[int | None, str]:
    """Return the number of a parameter's layer, None outside of layers, and the parameter's name inside it.

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
    """Return a parameter's name, including the number of its layer.

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


# This section chooses between readings of a bucket, of which there are several if equal values cross a slice's end.


def choose(readings: Sequence[Sequence[Reading]], orders: Sequence[Order]) -> list[Unit]:
    """Choose one reading of each bucket, and return the parameters of all buckets, in order.

    Args:
        readings: Possible readings of each bucket, that is, divisions into parameters.
        orders: Possible orders of modules. If some of a bucket's readings fit an order, only these count.

    Raises:
        UnsupportedValue: Several readings of a bucket fit, or it has too many.
    """
    in_all = (
        unit for bucket_readings in readings for unit in set(bucket_readings[0]).intersection(*bucket_readings[1:])
    )
    sure = {unit.candidates[0] for unit in in_all if _is_one(unit)}
    # All layers of a model are gated, or none is.
    counts = {len(pieces) for pieces in sure if may_be_gated(pieces[0])}
    units: list[Unit] = []
    for possible in readings:
        left = [
            reading for reading in possible if len(possible) == 1 or all(_has_form(unit, counts) for unit in reading)
        ]
        fitting = [reading for reading in left if any(_descends(reading, order) for order in orders)]
        left = fitting or left
        if len({tuple(_pieces_of(reading)) for reading in left}) != 1 or len(possible) == MOST_READINGS:
            raise _unclear({unit for reading in left or possible for unit in reading}, orders)
        units += left[0]
    return units


def _pieces_of(reading: Reading) -> Iterator[Hashable]:
    """Yield (offset, chunk) for a divided bucket; an ambiguous parameter's chunk is the tuple of its candidates."""
    for unit in reading:
        pieces = unit.candidates[0] if _is_one(unit) else (unit.candidates,)
        size = (unit.end - unit.begin) // len(pieces)
        yield from ((unit.begin + number * size, piece) for number, piece in enumerate(pieces))


def _is_one(unit: Unit) -> bool:
    return len(unit.candidates) == 1


def _has_form(unit: Unit, counts: set[int]) -> bool:
    """Return whether a candidate of the unit fits the known layers: in a model, all layers are gated, or none is.

    `counts` has the distinct numbers of chunks per `linear_fc1` of the known layers: 2 in a gated layer, else 1.
    """
    return any(len(counts) != 1 or not may_be_gated(pieces[0]) or len(pieces) in counts for pieces in unit.candidates)


def _descends(reading: Reading, order: Order) -> bool:
    """Return whether the parameters of a divided bucket fit a module order, reversed, for some choice of chunks."""
    last: ParameterPlace | None = None
    for unit in reading:
        places = [order.place(pieces[0]) for pieces in unit.candidates]
        known_places = [place for place in places if place is not None]
        if len(known_places) < len(places) and order.names is None:
            continue  # It may belong to a module that the order doesn't have.
        if _may_be_copy(unit):
            continue
        below = [place for place in known_places if last is None or place < last]
        if not below:
            return False
        last = max(below)
    return True


def _may_be_copy(unit: Unit) -> bool:
    """Return whether a parameter may be an embedding, or an embedding's tied copy in the output layer's position."""
    return any(_first_match(_SECTIONS, pieces[0].key) == 0 for pieces in unit.candidates)


# This section decides between candidates with equal values.


@dataclass(frozen=True, slots=True)
class Match:
    """A parameter in a bucket, matched with the stored chunks of the model that have its values.

    Attributes:
        bucket: Bucket that the parameter lies in.
        begin: First element in the bucket.
        end: One past the last element.
        pieces: The chunks of the model: one, or the two halves of a gated fc1, one after the other.
    """

    bucket: Bucket
    begin: int
    end: int
    pieces: Candidate


def decide(
    groups: Sequence[Sequence[Unit]], orders: Sequence[Order], states: Callable[[Unit], Hashable]
) -> list[Match]:
    """Match the parameters in the buckets of all model-parallel ranks with chunks of the model.

    Args:
        groups: Parameters of each rank, in the order of its buckets.
        orders: Possible orders of modules; for a rank, an order counts only if it allows exactly one choice.
        states: Function that returns a fingerprint of a parameter's stored states; called if the orders don't decide.

    Raises:
        UnsupportedValue: Parameters may be swapped with each other, and their states differ.
    """
    groups = [_of_one_cut(units) for units in groups]
    answers = [_answers(units, orders) for units in groups]
    candidates: dict[Unit, Candidate] = {}
    if any(len(possible) != 1 for possible in answers):
        candidates = _settled_by_states([unit for units in groups for unit in units], states)
        groups = [[unit for unit in units if unit not in candidates] for units in groups]
        answers = [_answers(units, orders) for units in groups]
    for units, possible in zip(groups, answers, strict=True):
        if len(possible) != 1:
            raise _unclear(units, orders)
        candidates.update(zip(units, possible.pop(), strict=True))
    _warn_of_order([unit for units in groups for unit in units], orders)
    return [Match(*unit[:3], pieces) for unit, pieces in candidates.items()]


def _warn_of_order(units: Sequence[Unit], orders: Sequence[Order]) -> None:
    """Warn if some parameters were distinguished only by the order of Megatron-Core's own modules."""
    unsure = {full_name(piece) for unit in units if not _is_one(unit) for pieces in unit.candidates for piece in pieces}
    if unsure and all(order.names is None for order in orders):
        logger.warning(
            "load: %s have equal weights; their moments were told apart by the order in which Megatron-Core's layers "
            "register their modules. Pass parameter_names= if your layers register them in another order.",
            ", ".join(shorten(map(repr, sorted(unsure)), shown=5)),
        )


def _answers(units: Sequence[Unit], orders: Sequence[Order]) -> set[tuple[Candidate, ...]]:
    return {tuple(answer) for order in orders if (answer := _in_order(units, order)) is not None}


def _unclear(units: Collection[Unit], orders: Sequence[Order]) -> UnsupportedValue:
    unclear = sorted(
        {full_name(piece) for unit in units if not _is_one(unit) for pieces in unit.candidates for piece in pieces}
    )
    group = next(iter(units)).bucket.group
    heading = f"open: parameters of {group!r} have equal weights, and their moments cannot be told apart"
    fix = "Pass parameter_names=, the names in the order of the model's named_parameters(), with layers' numbers."
    if any(order.names is not None for order in orders):
        fix = (
            "Leave frozen parameters out of parameter_names=; if that does not help, load a checkpoint of a later step."
        )
    return UnsupportedValue(error_text(heading, offenders=unclear, fix=fix))


def _settled_by_states(units: Sequence[Unit], states: Callable[[Unit], Hashable]) -> dict[Unit, Candidate]:
    """Assign chunks with equal values to parameters with equal stored states, for which any assignment is right.

    Such parameters are left out if there are more or fewer chunks, or if other parameters may have these chunks.
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
    """Return a rank's parameters without the candidates (chunks with equal values) of other tensor-parallel ranks.

    A rank holds one part of each axis that is cut. Parameters with a single candidate show which part it is.
    """
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
    """Yield, for each axis that is cut into equal parts, the count of parts and the number of the candidate's part.

    The axis of stacked layers is left out.
    """
    first = candidate[0]
    axes = zip(first.offset, first.shape, first.global_shape, strict=True)
    layers = re.search(r"\blayers\.(?!\d)", first.key) is not None
    for at, size, whole in list(axes)[int(layers) :]:
        if size and size < whole and whole % (size * len(candidate)) == 0 and at % size == 0:
            yield whole // (size * len(candidate)), at // size


def _in_order(units: Sequence[Unit], order: Order) -> list[Candidate] | None:
    """Choose each parameter's chunk by the module order, reversed in a buffer; return None unless one choice fits."""
    answer: list[Candidate | None] = [unit.candidates[0] if len(unit.candidates) == 1 else None for unit in units]
    chosen_pieces = {pieces for pieces in answer if pieces is not None}
    if len(chosen_pieces) < sum(pieces is not None for pieces in answer) or not all(unit.candidates for unit in units):
        return None  # A tensor can't be in a rank's optimizer twice.
    for _, rows in groupby(range(len(units)), key=lambda row: units[row].bucket.buffer):
        for run, above, below in _runs(list(rows), units, order):
            pool = {pieces for row in run for pieces in units[row].candidates} - chosen_pieces
            if order.names is None and any(order.place(pieces[0]) is None for pieces in pool):
                return None  # A module that this order doesn't have may have any place.
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
    """Yield the rows of each run of parameters with several candidates, and the places in `order` of its neighbours.

    `rows` are the indices of one buffer's parameters in `units`. At an end of the buffer, a place is None.
    """
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
    """Return `place` if it lies between two bounds, in the layer of a bound or outside of all layers; else None.

    `above` is the upper bound in the module order, `below` the lower one. A bound of None excludes nothing.
    """
    bounds = [bound for bound in (above, below) if bound is not None]
    if place is None or (above is not None and place > above) or (below is not None and place < below):
        return None
    # Layers between those of the bounds are in another buffer if a rank has several stages of the pipeline.
    near = place.layer < 0 or not bounds or any(bound.layer == place.layer for bound in bounds)
    return place if near else None
