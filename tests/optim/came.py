"""CAME, written from its paper: moments of which rows' and columns' means are kept, and a confidence in each update.

Luo, Ren, Zheng, Jiang, Jiang and You, "CAME: Confidence-guided Adaptive Memory Efficient Optimization", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class CAME(torch.optim.Optimizer):
    """Algorithm 2 of the paper; a parameter without two axes has whole second moments and no confidence."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "clip": clip})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    _update(param, param.grad, self.state[param], group)


def _update(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    (first, second, third), (small, smaller) = group["betas"], group["eps"]
    state["step"] = state.get("step", 0) + 1
    squares = grad.square() + small
    if grad.ndim < 2:
        mean = _moved(state, "exp_avg_sq", squares, second)
        scaled = grad * mean.rsqrt()
    else:
        scaled = grad / _factored(state, "exp_avg_sq", squares, second).sqrt()
    scaled = scaled / max(1.0, float(scaled.square().mean().sqrt()) / group["clip"])
    moment = _moved(state, "exp_avg", scaled, first)
    if grad.ndim < 2:
        param -= group["lr"] * moment
        return
    instability = (scaled - moment).square() + smaller
    param -= group["lr"] * moment / _factored(state, "exp_avg_res", instability, third).sqrt()


def _moved(state: dict[str, Any], name: str, value: torch.Tensor, decay: float) -> torch.Tensor:
    """Return a moving average that begins at zero, kept under a name."""
    state[name] = decay * state.get(name, torch.zeros_like(value)) + (1 - decay) * value
    average: torch.Tensor = state[name]
    return average


def _factored(state: dict[str, Any], name: str, value: torch.Tensor, decay: float) -> torch.Tensor:
    """Return the product of the means of rows and of columns, which are all that is kept, over the mean of all."""
    rows = _moved(state, f"{name}_row", value.mean(dim=-1), decay)
    columns = _moved(state, f"{name}_col", value.mean(dim=-2), decay)
    return rows.unsqueeze(-1) * columns.unsqueeze(-2) / rows.mean(dim=-1, keepdim=True).unsqueeze(-1)
