"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalized by Newton–Schulz iterations."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def orthogonalise(x: Tensor, iterations: int = 5) -> Tensor:
    """Orthogonalize batched [n, rows, columns], rows ≤ columns → nearly orthonormal rows."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Optimizer for the matrices inside the blocks.

    Matrices of equal shapes are orthogonalized together, shared among processes.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update from the gradients."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(tuple(param.shape), []).append(param)
            for shape, params in by_shape.items():
                self._update(group, shape, params)

    def _update(self, group: dict[str, float], shape: tuple[int, ...], params: list[Tensor]) -> None:
        momentum = group["momentum"]
        updates = []
        for param in params:
            assert param.grad is not None
            buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
            buffer.lerp_(param.grad, 1 - momentum)
            updates.append(param.grad.lerp(buffer, momentum))
        tall = shape[0] > shape[1]
        stacked = torch.stack([u.mT if tall else u for u in updates])
        if dist.is_initialized():
            mine = slice(dist.get_rank(), None, dist.get_world_size())
            flat = torch.zeros_like(stacked)
            flat[mine] = orthogonalise(stacked[mine])
            dist.all_reduce(flat)
        else:
            flat = orthogonalise(stacked)
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        for param, update in zip(params, flat.mT if tall else flat, strict=True):
            param.mul_(1 - group["lr"] * group["decay"])
            param.add_(update, alpha=-group["lr"] * scale)
