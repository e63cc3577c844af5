"""Configurations in which a chunk can be generated: steps, window, sparsity of attention, decoder.

A configuration belongs to one chunk. It changes what the chunk's forwards read, never what they write: the
ring keeps every frame, so that the next chunk may be generated at any configuration (SlackServe, 4.2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from turboserve.worker.engine.errors import InvalidFidelityError
from turboserve.worker.model.config import ModelConfig

AttentionName = Literal["rows", "flash", "cudnn", "varlen", "fp8"]
"""How all forwards of a worker attend: see `tensor_backend.KINDS`. `fp8` alone is of lower fidelity."""
LARGEST_BLOCK = 64
"""Largest number of keys that sparse attention selects or skips together."""


@dataclass(frozen=True)
class Fidelity:
    """One configuration. More of `steps` and `window_chunks` is better, and less of `sparsity`."""

    steps: int
    """Number of denoising forwards."""
    window_chunks: int
    """Number of newest chunks that attention reads beside the sink, the chunk itself included."""
    sparsity: float = 0.0
    """Share of the key blocks that attention skips, 0 ≤ sparsity < 1."""
    fast_decoder: bool = False
    """Whether the model's second, faster decoder (`Models.fast_decoder`) decodes the chunk."""

    @classmethod
    def best(cls, config: ModelConfig) -> Fidelity:
        """The configuration for which the model was made."""
        return cls(len(config.denoising_steps), most_chunks(config))

    def check(self, config: ModelConfig) -> Fidelity:
        """Return the configuration. Raises `InvalidFidelityError`."""
        best = Fidelity.best(config)
        for field, value, most in (
            ("steps", self.steps, best.steps),
            ("window_chunks", self.window_chunks, best.window_chunks),
        ):
            if not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidFidelityError(field, value, f"in 1..{most}")
        if not 0 <= self.sparsity < 1:
            raise InvalidFidelityError("sparsity", self.sparsity, "at least 0 and below 1")
        if not isinstance(self.fast_decoder, bool):
            raise InvalidFidelityError("fast_decoder", self.fast_decoder, "true or false")
        return self

    def to_mapping(self) -> dict[str, Any]:
        """The fields for JSON. Releases without a second decoder read all that name none."""
        fields = asdict(self)
        if not self.fast_decoder:
            del fields["fast_decoder"]
        return fields

    @property
    def label(self) -> str:
        """Short text for tables and logs, such as `4 steps, window 2, sparsity 0.6`."""
        decoder = ", fast decoder" if self.fast_decoder else ""
        return f"{self.steps} steps, window {self.window_chunks}, sparsity {self.sparsity:g}{decoder}"


def check_floor(floor: object) -> float:
    """Return a least quality. Raises `InvalidFidelityError`."""
    number = isinstance(floor, int | float) and not isinstance(floor, bool)
    if not number or not 0 <= floor <= 1:  # type: ignore[operator]
        raise InvalidFidelityError("floor", floor, "in 0..1")
    return float(floor)  # type: ignore[arg-type]


def most_chunks(config: ModelConfig) -> int:
    """Number of chunks that the whole window holds beside its sink."""
    sink = config.sink_size if config.local_attn_size != -1 else 0
    return -(-(config.window_frames - sink) // config.frames_per_chunk)


def step_indices(steps: int, all_steps: int) -> tuple[int, ...]:
    """Which of the model's denoising steps a chunk of `steps` forwards takes, evenly spaced from the first.

    The first step begins with pure noise. No source states which steps a shorter schedule takes.
    """
    return tuple(i * all_steps // steps for i in range(steps))


def block_size(tokens_per_frame: int) -> int:
    """Keys in one block of sparse attention: the largest divisor of a frame up to `LARGEST_BLOCK`."""
    return max(n for n in range(1, LARGEST_BLOCK + 1) if tokens_per_frame % n == 0)
