"""Flow matching: the sigma table, a model's warped steps, and the arithmetic between two forwards."""

from __future__ import annotations

import torch
from torch import Tensor

from turboserve.worker.model.config import ModelConfig


class Schedule:
    """Shifted flow-matching table of a model, and its sampling steps.

    σ is the fraction of noise: x_t = (1 − σ)·x0 + σ·ε, and the model predicts flow = ε − x0.
    """

    def __init__(self, config: ModelConfig) -> None:
        count, shift = config.num_train_timesteps, config.timestep_shift
        # The table is built in float32, as in the references: their steps come from this table.
        linear = torch.linspace(1.0, 0.0, count + 1)[:-1]
        self.sigmas: Tensor = shift * linear / (1 + (shift - 1) * linear)
        """[num_train_timesteps], decreasing."""
        self.timesteps: Tensor = self.sigmas * count
        """[num_train_timesteps]: σ in units of timesteps."""
        self.steps = tuple(float(self.timesteps[count - step]) for step in config.denoising_steps)
        """Warped timestep of each denoising forward."""
        self.step_sigmas = tuple(float(self.sigma_of(torch.tensor(step))) for step in self.steps)
        """σ of each denoising forward."""
        self.context_timestep: float = config.context_noise
        """Timestep of the clean pass."""

    def sigma_of(self, timesteps: Tensor) -> Tensor:
        """σ of the table's nearest timestep, float64, same shape."""
        table = self.timesteps.to(timesteps.device, torch.float64)
        nearest = (timesteps.to(torch.float64).unsqueeze(-1) - table).abs().argmin(-1)
        return self.sigmas.to(timesteps.device, torch.float64)[nearest]


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """(1 − σ)·x0 + σ·ε in x0's dtype; σ is a number or broadcasts over x0."""
    return ((1 - sigma) * x0 + sigma * noise).to(x0.dtype)


def to_clean(noisy: Tensor, flow: Tensor, sigma: Tensor | float) -> Tensor:
    """x0 = x_t − σ·flow, computed in float64, in the dtype of `noisy`; σ as in `add_noise`."""
    return (noisy.double() - sigma * flow.double()).to(noisy.dtype)
