"""Whether an index's texts are sorted is found from their bytes, eight at a time, as from the texts themselves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from shardtree.shell.table.index import _columns as module
from shardtree.shell.table.index import _file
from shardtree.shell.table.index._columns import ascend, text_columns

# Of few letters, so that many are equal for more than eight bytes or begin as others do; zeros are what padding is.
TEXTS = hs.lists(
    hs.text("\0aé", max_size=3).map(lambda end: "layers." + end) | hs.text("\0ab", max_size=20), max_size=6
)


def law_of_order(texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    expected = all(left < right for left, right in pairwise(encoded))
    assert ascend(*text_columns(texts)) == expected
    assert _file._ascend(*text_columns(texts)) == expected


@given(TEXTS, hs.booleans(), hs.sampled_from([0, 1, 2, 64]), hs.integers(1, 4))
def test_texts_ascend_as_their_bytes_do(texts: list[str], in_order: bool, most: int, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_WORDS", most)
        patch.setattr(_file, "_ROWS", rows)
        law_of_order(sorted(set(texts)) if in_order else texts)


def test_the_law_of_order_catches_bytes_of_the_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["ab", "abb", "c"]
    law_of_order(texts)
    words_at = module._words_at
    monkeypatch.setattr(module, "_words_at", lambda words, at, left: words_at(words, at.clip(0, 1), left * 0 + 8))
    with pytest.raises(AssertionError):
        law_of_order(texts)
