"""The same model as a process has it that knows nothing of parallel ranks: weights apart, torch's own functions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from tests.training.transformer import Config
from tests.training.zero import DECAY, NO_DECAY, drawn_tokens, shrink

Weights = Mapping[str, torch.Tensor]


def mean_loss(config: Config, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = weights["embedding.weight"][inputs] + weights["position.weight"][: inputs.shape[1]]
    for layer in range(config.layers):
        own = {name.removeprefix(f"layers.{layer}."): each for name, each in weights.items()}
        x = x + _attention(config, own, _norm(x, own["input_layernorm.weight"]))
        normed = _norm(x, own["pre_mlp_layernorm.weight"])
        gate, up = normed @ own["mlp.gate_proj.weight"].T, normed @ own["mlp.up_proj.weight"].T
        x = x + (functional.silu(gate) * up) @ own["mlp.linear_fc2.weight"].T
    output = weights["embedding.weight" if config.tied else "output_layer.weight"]
    logits = _norm(x, weights["final_layernorm.weight"]) @ output.T
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps=1e-6)


def _attention(config: Config, own: Weights, x: torch.Tensor) -> torch.Tensor:
    def heads(name: str) -> torch.Tensor:
        return (x @ own[f"self_attention.{name}.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

    mixed = functional.scaled_dot_product_attention(
        heads("q_proj"), heads("k_proj"), heads("v_proj"), is_causal=True, enable_gqa=True
    )
    return mixed.transpose(1, 2).flatten(2) @ own["self_attention.linear_proj.weight"].T


def plain_losses(
    config: Config,
    weights: Weights,
    steps: int,
    draw: torch.Generator,
    states: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    taken: int = 0,
) -> list[float]:
    """Return the losses of some steps of AdamW.

    Args:
        config: the model's.
        weights: whole, in float32, by name.
        steps: how many.
        draw: where the data come from.
        states: the optimizer's, by its key and the parameter's name; none at the beginning.
        taken: how many steps were taken before.
    """
    held = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    groups = [
        {"params": [each for each in held.values() if (each.ndim > 1) is decays], **settings}
        for decays, settings in ((True, DECAY), (False, NO_DECAY))
    ]
    optimizer = torch.optim.AdamW(groups)
    for name, weight in held.items():
        optimizer.state[weight].update({key: states[key][name].clone() for key in states} if states else {})
    for _ in range(taken):
        shrink(optimizer)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mean_loss(config, held, drawn_tokens(config, draw))
        loss.backward()
        optimizer.step()
        shrink(optimizer)
        losses.append(float(loss.detach()))
    return losses
