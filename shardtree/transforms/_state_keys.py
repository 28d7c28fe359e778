"""Relation of states to parameters by their keys alone: moments, masters and averages, wherever they are in a tree."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_OPTIMIZER = re.compile(r"opt(?:im(?:izer)?s?)?(?:_?states?)?(?:_?[0-9]+)?")
"""Pattern of a key's part that names an optimizer."""
_STATES = frozenset(
    """
    exp_avg exp_avg_sq max_exp_avg_sq exp_inf mu_product momentum_buffer square_avg grad_avg acc_delta sum step
    step_size prev ax eta row_var col_var variance fp32_param master_param master_weight
    mu nu trace v_row v_col acc_grads ema ema_params
    """.split()
)
"""Names of states in optimizers of torch, Megatron-Core and optax."""

_COPIES = frozenset("fp32_param master_param master_weight ax ema ema_params".split())
"""States that are the parameter's own values, in another dtype or averaged."""
_WORDS = frozenset("mu nu sum step prev ax eta trace variance".split())
"""Names of states that parts of models have too, such as a VAE's `mu`."""
_GROUPS = frozenset("state states param_group param_groups".split())

_INNER = re.compile(rf"states?|param_groups?|[0-9]+|{_OPTIMIZER.pattern}")
"""Pattern of a part before a parameter's key that doesn't belong to the model."""

Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateKey:
    """A state's key, as its parameter's key with a prefix and a suffix.

    Attributes:
        parameter: The parameter's key.
        root: Prefix of the parameter's key that the state's key lacks, with the dot.
        before: Part of the state's key before the parameter's, with the dot.
        after: Part of the state's key after the parameter's, with the dot.
    """

    parameter: str
    root: str
    before: str
    after: str

    @property
    def is_copy(self) -> bool:
        """Whether the state holds values of the parameter itself, as masters and averages do."""
        return not _COPIES.isdisjoint(f"{self.before}{self.after}".split("."))

    def of(self, parameter: str) -> str | None:
        """Return the key of the same state of another parameter; None if that parameter's key lacks the prefix `root`.

        Examples:
            >>> key = StateKey("model.layers.2.w", "model.", "opt.0.mu.", "")
            >>> key.of("model.layers.1.w"), key.of("head.w")
            ('opt.0.mu.layers.1.w', None)
        """
        if not parameter.startswith(self.root):
            return None
        return f"{self.before}{parameter.removeprefix(self.root)}{self.after}"


def state_keys(keys: Collection[str], others: Collection[str] = ()) -> tuple[dict[str, StateKey], dict[str, Parts]]:
    """Return the states among a tree's keys, by key, and the keys of states that can't be related to one parameter.

    A state's key contains its parameter's key, and outside of it a state's name, such as ``exp_avg`` or ``mu``. It may
    leave out the first parts of the parameter's key, such as ``model``. Then a name that models use too, such as
    ``mu``, isn't enough: an optimizer must be named as well. So ``optim.state.layers.2.w.exp_avg`` and
    ``opt.0.mu.layers.2.w`` belong to ``model.layers.2.w``, but ``opt.layers.2.w`` and ``mu.layers.2.w`` don't.

    Args:
        keys: All keys of a tree, parameters' and states'.
        others: Keys of values that may be states, but aren't parameters.

    Returns:
        The states by key; and, for each other key that looks like a state's, the keys of its possible parameters. These
        are at least two, or none.

    Examples:
        >>> states, unclear = state_keys(["model.h.2.w", "model.norm.w", "opt.0.mu.h.2.w", "opt.state.norm.w.exp_avg"])
        >>> {key: state.parameter for key, state in states.items()}
        {'opt.0.mu.h.2.w': 'model.h.2.w', 'opt.state.norm.w.exp_avg': 'model.norm.w'}
        >>> state_keys(["encoder.w", "decoder.w", "opt.mu.w"])[1]
        {'opt.mu.w': ('decoder.w', 'encoder.w')}
    """
    parts_of = {key: tuple(key.split(".")) for key in (*keys, *others)}
    under = {key for key, parts in parts_of.items() if _is_under_states(parts)}
    likely = {key: parts for key, parts in parts_of.items() if key in under or parts[-1] in _STATES}
    ends: dict[Parts, list[str]] = {}
    for key in parts_of.keys() - under - {*others} if likely else ():
        for at in range(len(parts_of[key])):
            ends.setdefault(parts_of[key][at:], []).append(key)
    states: dict[str, StateKey] = {}
    unclear: dict[str, Parts] = {}
    for key, parts in likely.items():
        state = _state_key(key, parts, ends)
        if isinstance(state, StateKey):
            states[key] = state
        elif state or (key in under and _is_surely_state(parts)):
            unclear[key] = state
    return states, unclear


def _state_key(key: str, parts: Parts, ends: Mapping[Parts, list[str]]) -> StateKey | Parts:
    """Return the `StateKey` of a state's key if it has one possible parameter; else all possible parameters' keys.

    Args:
        key: Key that may be a state's.
        parts: The same key, split at its dots.
        ends: Parameters' keys by each of their suffixes, which are split at the dots.
    """
    start, stop = _parameter_in(key, parts, ends)
    before, run, after = parts[:start], parts[start:stop], parts[stop:]
    name, around = ".".join(run), (*before, *after)
    others = ends.get(run, ())
    is_whole = name in others
    # If first parts are left out, the part before the run must be the optimizer's, not the model's: the ``w`` in
    # ``opt.mu.a.w`` isn't ``b.w``. And ``opt.layers.2.w`` may be a layer of an OPT model beside another model.
    if not (_names_state(around) if is_whole else _is_surely_state(around) and _ends_names(before)):
        return ()
    owners = [name] if is_whole else sorted({*others} - {key})
    if len(owners) != 1:
        return tuple(owners)
    in_front, behind = "".join(f"{part}." for part in before), "".join(f".{part}" for part in after)
    return StateKey(owners[0], owners[0].removesuffix(name), in_front, behind)


def _names_state(parts: Parts) -> bool:
    return not _STATES.isdisjoint(parts) or not _GROUPS.isdisjoint(parts)


def _is_surely_state(parts: Parts) -> bool:
    if not (_STATES - _WORDS).isdisjoint(parts):
        return True
    return _names_state(parts) and any(part.startswith("opt") and _OPTIMIZER.fullmatch(part) for part in parts)


def _ends_names(before: Parts) -> bool:
    return not before or before[-1] in _STATES or _INNER.fullmatch(before[-1]) is not None


def _is_under_states(parts: Parts) -> bool:
    return parts[0] in _STATES or any(part.startswith("opt") and _OPTIMIZER.fullmatch(part) for part in parts[:-1])


def _parameter_in(key: str, parts: Parts, ends: Mapping[Parts, list[str]]) -> tuple[int, int]:
    """Return the start and stop of the parameter's key among the parts of a state's key; (0, 0) if it isn't found.

    The parameter's key is the longest run of parts that is a suffix of a key in `ends`. It counts only if the parts
    before the run name a state or an optimizer, or if the last part, after the run, names a state.

    Args:
        key: The state's key.
        parts: The same key, split at its dots.
        ends: Parameters' keys by each of their suffixes, which are split at the dots.
    """
    for length in range(len(parts) - 1, 0, -1):
        for start in range(len(parts) - length + 1):
            if any(other != key for other in ends.get(parts[start : start + length], ())):
                before, after = parts[:start], parts[start + length :]
                named = (before and _is_under_states((*before, ""))) or not _STATES.isdisjoint(after[-1:])
                return (start, start + length) if named else (0, 0)
    return 0, 0
