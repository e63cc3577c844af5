"""Every size and setting of one causal video transformer. Other modules contain no number of a model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Rotation = Literal["absolute", "window"]


class ModelConfigError(ValueError):
    """A model's configuration is malformed. The message names the field and the limit. Do not retry."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer and its sampling. Frames are latent frames, unless named pixel frames."""

    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    text_dim: int
    text_len: int
    """Tokens per prompt. Shorter prompts are padded with zero vectors, which attention does not mask."""
    latent_height: int
    latent_width: int
    in_dim: int = 16
    out_dim: int = 16
    freq_dim: int = 256
    """Width of the sinusoidal embedding of a timestep."""
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6

    local_attn_size: int = -1
    """Number of frames that a token attends to, its own chunk and the sink included. -1: all earlier ones."""
    sink_size: int = 0
    """Number of first frames of a session that are never evicted; counted in `local_attn_size`."""
    max_frames: int = 21
    """Largest number of frames of a session where there is no window."""
    frames_per_chunk: int = 3

    rotation: Rotation = "absolute"
    """Position of keys. `absolute`: keys carry their absolute frame index (Self-Forcing, LongLive 1).
    `window`: the sink is read as if it directly preceded the rolling frames (LongLive's "infinity"), so that
    a session never ends."""
    rotation_frames: int = 1024
    """Number of frames for which absolute rotation is defined; a session ends there. `window` ignores it."""
    rotation_theta: float = 10000.0
    learned_positions: bool = False
    """Whether to add a learned vector to each patch, by its place in the frame. Rotation gives patches only
    their relative distance, which is all that Wan's checkpoints use."""

    timestep_shift: float = 5.0
    denoising_steps: tuple[int, ...] = (1000, 750, 500, 250)
    """Unwarped timesteps of a chunk's denoising forwards; `Schedule` warps them."""
    context_noise: float = 0.0
    """Timestep of the clean pass that writes a chunk's final keys and values."""
    num_train_timesteps: int = 1000

    pixels_per_latent: int = 8
    frames_per_latent: int = 4
    """Number of pixel frames decoded from each latent frame; a session's first latent frame gives one."""
    fps: int = 16

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_kind(field.name, str(field.type), getattr(self, field.name))
        for name in _POSITIVE:
            _require(getattr(self, name) > 0, name, getattr(self, name), "greater than 0")
        _require(
            self.dim % self.num_heads == 0, "dim", self.dim, f"a multiple of num_heads ({self.num_heads})"
        )
        _require(self.head_dim % 2 == 0, "dim", self.dim, "an even number of channels per head")
        _require(self.freq_dim % 2 == 0, "freq_dim", self.freq_dim, "even")
        _require(len(self.patch_size) == 3, "patch_size", self.patch_size, "three sizes: time, height, width")
        _require(min(self.patch_size) > 0, "patch_size", self.patch_size, "greater than 0")
        _require(self.patch_size[0] == 1, "patch_size", self.patch_size, "1 in time: the ring holds frames")
        _require(
            self.latent_height % self.patch_size[1] == 0, "latent_height", self.latent_height, "in patches"
        )
        _require(self.latent_width % self.patch_size[2] == 0, "latent_width", self.latent_width, "in patches")
        _require(self.sink_size >= 0, "sink_size", self.sink_size, "0 or more")
        _require(bool(self.denoising_steps), "denoising_steps", self.denoising_steps, "at least one step")
        for step in self.denoising_steps:
            _require(
                0 < step <= self.num_train_timesteps,
                "denoising_steps",
                step,
                f"in 1..{self.num_train_timesteps}",
            )
        _require(self.rotation in ("absolute", "window"), "rotation", self.rotation, "absolute or window")
        if self.local_attn_size != -1:
            room = self.local_attn_size - self.sink_size
            _require(
                room >= self.frames_per_chunk,
                "local_attn_size",
                self.local_attn_size,
                f"at least sink_size + frames_per_chunk ({self.sink_size} + {self.frames_per_chunk})",
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.dim // self.num_heads

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of one frame: rows, columns."""
        return self.latent_height // self.patch_size[1], self.latent_width // self.patch_size[2]

    @property
    def frame_size(self) -> tuple[int, int]:
        """Width and height of a frame, pixels."""
        return self.latent_width * self.pixels_per_latent, self.latent_height * self.pixels_per_latent

    def with_frame_size(self, size: tuple[int, int] | None) -> ModelConfig:
        """Return the configuration for frames of another width and height, pixels. None: of these.

        The weights must be such that they compute frames of any size.

        Raises ModelConfigError if a side is not in whole patches, if patches have learned positions, which
        exist for one size only, or if the size is this configuration's own: it has no second name.
        """
        if size is None:
            return self
        label = f"{size[0]}x{size[1]}"
        own = "{}x{}".format(*self.frame_size)
        _require(size != self.frame_size, "frame size", label, "left out, since it is the model's own")
        _require(not self.learned_positions, "frame size", label, f"the model's only one, {own}")
        for side, patch in ((size[1], self.patch_size[1]), (size[0], self.patch_size[2])):
            step = patch * self.pixels_per_latent
            _require(side > 0 and side % step == 0, "frame size", label, f"in patches of {step} pixels")
        return dataclasses.replace(
            self,
            latent_width=size[0] // self.pixels_per_latent,
            latent_height=size[1] // self.pixels_per_latent,
        )

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of one latent frame."""
        rows, columns = self.grid
        return rows * columns

    @property
    def window_frames(self) -> int:
        """Ring positions of one session: the window, or all frames that it may generate without a window."""
        return self.max_frames if self.local_attn_size == -1 else self.local_attn_size

    @property
    def chunk_forwards(self) -> int:
        """Number of forwards of one chunk: the denoising steps and the clean pass."""
        return len(self.denoising_steps) + 1

    @property
    def session_frames(self) -> int | None:
        """Largest number of frames of one session; None: no limit."""
        limits = []
        if self.local_attn_size == -1:
            limits.append(self.max_frames)
        if self.rotation == "absolute":
            limits.append(self.rotation_frames)
        return min(limits, default=None)

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """Shape of one chunk's latents: frames, channels, height, width."""
        return self.frames_per_chunk, self.in_dim, self.latent_height, self.latent_width

    def pixel_frames(self, chunk: int) -> int:
        """Number of pixel frames that chunk `chunk` (from 0) decodes to."""
        frames = self.frames_per_chunk * self.frames_per_latent
        return frames - (self.frames_per_latent - 1) if chunk == 0 else frames

    @property
    def chunk_media_s(self) -> float:
        """Seconds of video of one chunk. The first chunk is shorter."""
        return self.frames_per_chunk * self.frames_per_latent / self.fps

    def media_start(self, chunk: int) -> float:
        """Seconds of video before chunk `chunk`."""
        if chunk == 0:
            return 0.0
        frames = chunk * self.frames_per_chunk * self.frames_per_latent - (self.frames_per_latent - 1)
        return frames / self.fps

    @classmethod
    def field_names(cls) -> frozenset[str]:
        """Keys of a configuration."""
        return frozenset(field.name for field in dataclasses.fields(cls))

    def to_json(self) -> str:
        """The configuration as JSON, for a weights file's metadata."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, ignore: frozenset[str] = frozenset()) -> ModelConfig:
        """Read a configuration; see `from_mapping`."""
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ModelConfigError("config: not a JSON object")
        return cls.from_mapping(value, ignore=ignore)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, ignore: frozenset[str] = frozenset()) -> ModelConfig:
        """Build a configuration from decoded JSON. Keys in `ignore` are allowed and have no effect.

        Raises `ModelConfigError` for unknown or missing keys and for values out of range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(values.keys() - fields.keys() - ignore)
        if unknown:
            raise ModelConfigError(f"config: unknown keys {', '.join(unknown)}")
        needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        missing = sorted(needed - values.keys())
        if missing:
            raise ModelConfigError(f"config: missing keys {', '.join(missing)}")
        known: dict[str, Any] = {name: value for name, value in values.items() if name in fields}
        for name in ("patch_size", "denoising_steps"):
            if name in known:
                known[name] = tuple(known[name]) if isinstance(known[name], list) else known[name]
        return cls(**known)


_POSITIVE = tuple(
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.type in ("int", "float") and field.name not in ("local_attn_size", "sink_size", "context_noise")
)


def _check_kind(name: str, kind: str, value: object) -> None:
    """Check a value's type: values come from JSON, and may have any."""
    if kind == "bool":
        right = isinstance(value, bool)
        wanted = "true or false"
    elif kind == "int":
        right, wanted = type(value) is int, "an integer"
    elif kind == "float":
        right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        wanted = "a finite number"
    elif kind.startswith("tuple"):
        right = isinstance(value, tuple) and all(type(each) is int for each in value)
        wanted = "a list of integers"
    else:
        right, wanted = isinstance(value, str), "a string"
    if not right:
        raise ModelConfigError(f"{name}: {value!r} is not {wanted}")


def _require(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        raise ModelConfigError(f"{name}: {value!r} must be {limit}")
