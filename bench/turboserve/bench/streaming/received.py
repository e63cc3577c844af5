"""The video and the prompts of a test viewer's session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Received:
    """One chunk as it reached the viewer. Wall times are comparable on one machine only."""

    index: int
    epoch: int
    worker: str
    control_seq: int
    start_s: float
    end_s: float
    published_at: float
    """Wall time at which the worker handed it to the broker."""
    received_at: float
    """Wall time at which its last byte arrived."""
    size_bytes: int
    init: bytes
    fragment: bytes
    """The fragment. As `init`, it is empty unless the viewer keeps video."""
    fidelity: dict[str, Any] | None = None
    """Configuration of the chunk: steps, window_chunks, sparsity and quality. None: the best."""
    compute_s: float = 0.0
    """Time from the chunk's first denoising step to its packaging, seconds."""


@dataclass(frozen=True)
class PromptSwitch:
    """A prompt from its submission until it is seen. Times are monotonic seconds."""

    prompt_id: str
    control_seq: int
    submitted_s: float
    accepted_s: float
    next_chunk: int
    """Index of the chunk that would have arrived next at the submission."""
