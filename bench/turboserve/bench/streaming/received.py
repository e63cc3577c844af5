"""The video and the prompts of a test viewer's session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
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

    @classmethod
    def of(
        cls, announced: Mapping[str, Any], received_at: float, size_bytes: int, init: bytes, fragment: bytes
    ) -> Received:
        """Build it from the message that announced the chunk, and from what was received."""
        return cls(
            index=announced["index"],
            epoch=announced["epoch"],
            worker=announced["worker"],
            control_seq=announced["control_seq"],
            start_s=announced["start_s"],
            end_s=announced["start_s"] + announced["duration_s"],
            published_at=datetime.fromisoformat(announced["published_at"]).timestamp(),
            received_at=received_at,
            size_bytes=size_bytes,
            init=init,
            fragment=fragment,
            fidelity=announced.get("fidelity"),
            compute_s=announced["compute_s"],
        )


@dataclass(frozen=True)
class PromptSwitch:
    """A prompt from its submission until it is seen. Times are monotonic seconds."""

    prompt_id: str
    control_seq: int
    submitted_s: float
    accepted_s: float
    next_chunk: int
    """Index of the chunk that would have arrived next at the submission."""
