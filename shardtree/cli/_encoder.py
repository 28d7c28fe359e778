"""A BERT encoder's forward pass in plain torch, on a dict of weights with Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Weights = Mapping[str, Tensor]

_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """An encoder's sizes.

    Examples:
        >>> EncoderShape().head_size
        32
    """

    vocabulary: int = 30522
    hidden: int = 384
    layers: int = 6
    heads: int = 12
    intermediate: int = 1536
    positions: int = 512

    @property
    def head_size(self) -> int:
        """Rows of a query, key or value matrix that belong to one head."""
        return self.hidden // self.heads


def weight_shapes(shape: EncoderShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, by name.

    Examples:
        >>> shapes = weight_shapes(EncoderShape())
        >>> len(shapes), shapes["encoder.layer.5.output.dense.weight"]
        (103, (384, 1536))
    """
    shapes = dict(_embedding_shapes(shape))
    for layer in range(shape.layers):
        shapes |= {f"encoder.layer.{layer}.{name}": size for name, size in _layer_shapes(shape)}
    return shapes | dict(_dense("pooler.dense", shape.hidden, shape.hidden))


def _embedding_shapes(shape: EncoderShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows in (
        ("word_embeddings", shape.vocabulary),
        ("position_embeddings", shape.positions),
        ("token_type_embeddings", 2),
    ):
        yield f"embeddings.{name}.weight", (rows, shape.hidden)
    yield from _norm("embeddings.LayerNorm", shape.hidden)


def _layer_shapes(shape: EncoderShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("query", "key", "value"):
        yield from _dense(f"attention.self.{name}", shape.hidden, shape.hidden)
    yield from _dense("attention.output.dense", shape.hidden, shape.hidden)
    yield from _norm("attention.output.LayerNorm", shape.hidden)
    yield from _dense("intermediate.dense", shape.intermediate, shape.hidden)
    yield from _dense("output.dense", shape.hidden, shape.intermediate)
    yield from _norm("output.LayerNorm", shape.hidden)


def _dense(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


@torch.no_grad()
def embed(weights: Weights, sentences: Sequence[Sequence[int]], *, heads: int) -> Tensor:
    """Return a vector of length 1 for each sentence: the mean of its tokens' last hidden states.

    Args:
        weights: whole tensors by name.
        sentences: token ids.
        heads: attention heads in each layer.

    Returns:
        Tensor of (sentences, hidden).
    """
    means = [hidden_states(weights, torch.tensor(ids), heads=heads).mean(dim=0) for ids in sentences]
    return functional.normalize(torch.stack(means), dim=1)


def hidden_states(weights: Weights, ids: Tensor, *, heads: int) -> Tensor:
    """Return the last layer's state of each token.

    Args:
        weights: whole tensors by name.
        ids: of the tokens, int64 (tokens,).
        heads: attention heads in each layer.

    Returns:
        Tensor of (tokens, hidden).
    """
    parts = (
        functional.embedding(ids, weights["embeddings.word_embeddings.weight"]),
        weights["embeddings.position_embeddings.weight"][: len(ids)],
        weights["embeddings.token_type_embeddings.weight"][:1],
    )
    state = _normalised(weights, "embeddings.LayerNorm", parts[0] + parts[1] + parts[2])
    layer = 0
    while f"encoder.layer.{layer}.output.dense.weight" in weights:
        state = _layer(weights, f"encoder.layer.{layer}", state, heads)
        layer += 1
    return state


def _layer(weights: Weights, name: str, state: Tensor, heads: int) -> Tensor:
    attended = _applied(weights, f"{name}.attention.output.dense", _attention(weights, name, state, heads))
    state = _normalised(weights, f"{name}.attention.output.LayerNorm", attended + state)
    wide = functional.gelu(_applied(weights, f"{name}.intermediate.dense", state))
    return _normalised(weights, f"{name}.output.LayerNorm", _applied(weights, f"{name}.output.dense", wide) + state)


def _attention(weights: Weights, name: str, state: Tensor, heads: int) -> Tensor:
    query, key, value = (
        _applied(weights, f"{name}.attention.self.{part}", state).reshape(len(state), heads, -1).transpose(0, 1)
        for part in ("query", "key", "value")
    )
    return functional.scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1)


def _applied(weights: Weights, name: str, state: Tensor) -> Tensor:
    return functional.linear(state, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _normalised(weights: Weights, name: str, state: Tensor) -> Tensor:
    scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return functional.layer_norm(state, scale.shape, scale, shift, _EPSILON)
