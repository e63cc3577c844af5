"""Rotary position embedding over a latent frame's time, rows and columns (Wan 2.1, Self-Forcing)."""

from __future__ import annotations

import torch
from torch import Tensor

from turboserve.worker.model.config import ModelConfig


class Rotation:
    """Converts frame indices to rotations of query and key channels.

    A head has c channel pairs (2i, 2i+1): c − 2·⌊c/3⌋ for time, ⌊c/3⌋ for rows and ⌊c/3⌋ for columns. Angles
    are computed in float64, because an absolute frame index times a frequency loses too many bits in float32.
    The rotation itself runs in float32.
    """

    def __init__(self, config: ModelConfig) -> None:
        pairs = config.head_dim // 2
        spatial = pairs // 3
        self._theta = config.rotation_theta
        self._grid = config.grid
        self._split = (pairs - 2 * spatial, spatial, spatial)
        # These are not module buffers: casting a module to bfloat16 must not change them.
        self._by_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def prepare(self, device: torch.device) -> None:
        """Create the tables on a device, so that no forward waits for them."""
        self._tables(device)

    def at(self, frame_index: Tensor) -> Tensor:
        """Rotations of frames [B, F] (long, absolute): complex64 [B, F·T, 1, head_dim/2]."""
        time_frequencies, space = self._tables(frame_index.device)
        angles = frame_index.to(torch.float64).unsqueeze(-1) * time_frequencies
        batch, frames = frame_index.shape
        tokens = space.shape[0]
        rotation = torch.empty(
            batch, frames, tokens, sum(self._split), dtype=torch.complex64, device=frame_index.device
        )
        rotation[..., : self._split[0]] = torch.polar(torch.ones_like(angles), angles).unsqueeze(2)
        rotation[..., self._split[0] :] = space
        return rotation.view(batch, frames * tokens, 1, -1)

    def by_frames(self, frames: int, device: torch.device) -> Tensor:
        """The rotation that moves keys `frames` frames later: complex64 [1, 1, head_dim/2]."""
        time_frequencies, space = self._tables(device)
        angles = frames * time_frequencies
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        return torch.cat([turn, torch.ones_like(space[0])]).view(1, 1, -1)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._by_device:
            rows, columns = self._grid
            time, row, column = (self._frequencies(pairs) for pairs in self._split)
            by_row = torch.outer(torch.arange(rows, dtype=torch.float64), row)
            by_column = torch.outer(torch.arange(columns, dtype=torch.float64), column)
            angles = torch.cat(
                [
                    by_row[:, None].expand(rows, columns, -1),
                    by_column[None, :].expand(rows, columns, -1),
                ],
                dim=-1,
            ).reshape(rows * columns, -1)
            space = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
            self._by_device[device] = time.to(device), space.to(device)
        return self._by_device[device]

    def _frequencies(self, pairs: int) -> Tensor:
        exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float64) / max(2 * pairs, 1)
        return self._theta**-exponents


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate channel pairs of x [B, S, heads, head_dim] by complex64 [B, S, 1, head_dim/2].

    `rotation` may also be pairs of float32, [B, S, 1, head_dim/2, 2]: compilers do not support complex
    numbers.
    """
    pairs = x.float().view(*x.shape[:-1], -1, 2)
    if rotation.is_complex():
        turned = torch.view_as_real(torch.view_as_complex(pairs) * rotation)
    else:
        (a, b), (c, d) = pairs.unbind(-1), rotation.unbind(-1)
        turned = torch.stack([a * c - b * d, a * d + b * c], dim=-1)
    return turned.flatten(-2).to(x.dtype)
