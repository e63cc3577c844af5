"""Shared parts of the training scripts: pictures, moving averages, learning rates by time, provenance."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import struct
import subprocess
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn


def write_png(path: Path, image: Tensor) -> None:
    """Write image: uint8 [H, W, 3]."""
    height, width, _ = image.shape
    rows = image.contiguous().numpy()
    raw = b"".join(b"\0" + rows[y].tobytes() for y in range(height))

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(raw)) + part(b"IEND", b"")
    )


def contact_sheet(clips: Tensor, scale: int = 2) -> Tensor:
    """Arrange clips: uint8 [rows, columns, H, W, 3] → one picture uint8 [.., .., 3] with a thin grid."""
    rows, columns, height, width, _ = clips.shape
    sheet = torch.full((rows, columns, height + 2, width + 2, 3), 60, dtype=torch.uint8)
    sheet[:, :, 1:-1, 1:-1] = clips
    flat = sheet.permute(0, 2, 1, 3, 4).reshape(rows * (height + 2), columns * (width + 2), 3)
    return flat.repeat_interleave(scale, 0).repeat_interleave(scale, 1)


def warmup_cosine(progress: float, warmup: float = 0.02, floor: float = 0.02) -> float:
    """Return the factor of the learning rate. `progress`: 0..1 of the run."""
    if progress < warmup:
        return progress / warmup
    done = min(1.0, (progress - warmup) / (1.0 - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def warmup_hold_fall(progress: float, warmup: float = 0.02, fall: float = 0.25, floor: float = 0.02) -> float:
    """Return the factor of the learning rate: up, level, and down in the last part.

    `progress`: 0..1 of the run.
    """
    left = max(0.0, 1.0 - progress)
    return min(1.0, progress / warmup, max(floor, left / fall))


class MovingAverage:
    """Exponential moving average of a module's parameters, with a short memory at the start."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.values = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 10))
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.values[name].lerp_(value, 1.0 - decay)
            else:
                self.values[name].copy_(value)


def keep_memory() -> None:
    """Make glibc reuse freed memory.

    By default each large tensor is mapped again, and page faults then cost more than the arithmetic
    (rendering ran 10 times slower).
    """
    mmap_max, trim_threshold, top_pad = -4, -1, -2
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 256 * 2**20)


def commit() -> str:
    """Return the commit of these scripts, or `TRAINING_COMMIT` where they run outside a checkout."""
    if given := os.environ.get("TRAINING_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
