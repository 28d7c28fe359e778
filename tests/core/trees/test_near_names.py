"""Names that are near to one that isn't there: what was meant is found, among few names and among very many."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.trees import differing_prefix, near_names
from tests.core.trees.samples import assert_caught

Near = Callable[[Iterable[str], Collection[str]], dict[str, str]]

MANY = [f"decoder.layers.{layer}.{part}" for layer in range(400) for part in ("attention.weight", "mlp.bias")]


def mistyped(name: str, at: int) -> str:
    """Return a name with two neighbouring letters the other way round; digits stay."""
    return (
        name if {name[at], name[at + 1]} & set("0123456789") else name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    )


def finds_what_was_meant(near: Near, name: str, at: int, few: bool) -> None:
    key = mistyped(name, at % (len(name) - 1))
    names = [other for other in (MANY[:100] if few else MANY) if other != key]
    if name in names:
        assert near([key], names) == {key: name}


@given(st.sampled_from(MANY[:100]), st.integers(0, 99), st.booleans())
def test_a_typing_error_finds_what_was_meant(name: str, at: int, few: bool) -> None:
    finds_what_was_meant(near_names, name, at, few)


def test_a_typing_error_finds_catches_another_layer() -> None:
    def of_any_layer(keys: Iterable[str], names: Collection[str]) -> dict[str, str]:
        return {key: sorted(names)[0] for key in keys}

    cases = st.sampled_from(MANY[:100]), st.integers(0, 99), st.booleans()
    assert_caught(finds_what_was_meant, of_any_layer, *cases)


@pytest.mark.parametrize("names", [MANY, MANY[:20]], ids=["many", "few"])
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("xecoder.layers.7.mlp.bias", "decoder.layers.7.mlp.bias"),
        ("decoder.layers.7.mlp.bia", "decoder.layers.7.mlp.bias"),
        ("decoder.layers.007.mlp.bias", "decoder.layers.7.mlp.bias"),
        ("decoder.layers.00.mlp.bias", "decoder.layers.0.mlp.bias"),
        ("module.decoder.layers.3.attention.weight", "decoder.layers.3.attention.weight"),
    ],
)
def test_what_begins_or_ends_otherwise_is_found(key: str, name: str, names: list[str]) -> None:
    assert near_names([key], names) == {key: name}


def test_where_nothing_is_like_it_nothing_is_named() -> None:
    assert near_names(["x"], MANY) == {} == near_names(["x"], MANY[:9]) == near_names([], MANY) == near_names(["x"], [])


def test_the_first_ten_are_looked_for_and_none_that_is_very_long() -> None:
    keys = [f"weihgt_{letter}" for letter in "abcdefghijkl"]
    names = [f"weight_{letter}" for letter in "abcdefghijkl"]
    assert near_names(keys, names) == dict(list(zip(keys, names, strict=True))[:10])
    long, longest = "y" * 301, "z" * 300
    assert (
        near_names([long, longest, "z" * 299], [long[1:] + "x", longest[1:]])
        == {
            longest: longest[1:],
            "z" * 299: longest[1:],
        }
        | {}
    )


def test_of_many_names_a_hundred_on_each_side_are_compared() -> None:
    others = [f"a{number:04d}" for number in range(600)]
    assert near_names(["zzzb"], [*others, "zzza"]) == {"zzzb": "zzza"}
    assert near_names(["Zzzb"], ["Zzza", *others]) == {"Zzzb": "Zzza"}


# A prefix by which all keys differ.

Prefix = Callable[[list[str], set[str]], tuple[str, str] | None]
TEXTS = st.text("ab.", min_size=1, max_size=4)
SETS = st.sets(TEXTS, min_size=2, max_size=5)


def finds_the_prefix(differing: Prefix, names: set[str], others: set[str], text: str, lacks: bool) -> None:
    """Raise unless one is found exactly where there is one, and makes each key a name."""
    keys = sorted({name.removeprefix(text) if lacks else text + name for name in names} | others)
    known = names - set(keys)
    absent = [key for key in keys if key not in names and key]
    found = differing(absent, known)
    if found is not None:
        too_much, lacking = found
        assert all(key.startswith(too_much) and lacking + key[len(too_much) :] in known for key in absent)
        assert bool(too_much) != bool(lacking)
    candidates = {key[:end] for key in absent for end in range(1, len(key))}
    all_extra = any(all(k.startswith(p) and k[len(p) :] in known for k in absent) for p in candidates)
    longer = {name.removesuffix(key) for name in known for key in absent if name.endswith(key) and name != key}
    all_lacking = any(all(p + k in known for k in absent) for p in longer)
    assert (found is not None) == (len(absent) > 1 and (all_extra or all_lacking))


@given(SETS, st.sets(TEXTS, max_size=1), TEXTS, st.booleans())
def test_one_prefix_is_found_exactly_where_all_keys_differ_by_it(
    names: set[str], others: set[str], text: str, lacks: bool
) -> None:
    finds_the_prefix(differing_prefix, names, others, text, lacks)


def test_the_law_of_prefixes_catches_a_look_at_one_key() -> None:
    def of_the_first(keys: list[str], names: set[str]) -> tuple[str, str] | None:
        found = [key[:end] for key in keys[:1] for end in range(1, len(key)) if key[end:] in names]
        return (found[0], "") if found else None

    assert_caught(finds_the_prefix, of_the_first, SETS, st.sets(TEXTS, max_size=1), TEXTS, st.booleans())


def test_a_prefix_is_found_among_many_names_soon() -> None:
    names = {f"model.{name}.{number}" for name in MANY for number in range(100)}
    keys = sorted(name.removeprefix("model.") for name in names)
    assert differing_prefix(keys, names) == ("", "model.")
    assert differing_prefix(sorted(names), set(keys)) == ("model.", "")
