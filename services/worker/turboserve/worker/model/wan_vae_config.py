"""Sizes of a Wan VAE, as diffusers' `config.json` names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turboserve.worker.model.config import ModelConfigError

_THEIRS = {
    "base_dim": "base_dim",
    "decoder_base_dim": "decoder_base_dim",
    "z_dim": "z_dim",
    "dim_mult": "dim_mult",
    "num_res_blocks": "res_blocks",
    "temperal_downsample": "temporal_downsample",
    "latents_mean": "latents_mean",
    "latents_std": "latents_std",
    "out_channels": "out_channels",
}
_SETTLED: Mapping[str, tuple[Any, ...]] = {
    "is_residual": (False,),
    "attn_scales": ([],),
    "patch_size": (None, 1),
}
"""Keys that select another architecture (Wan 2.2's), and the values that select this one."""


@dataclass(frozen=True)
class WanVaeConfig:
    """Sizes of the decoder, by default those of Wan 2.1."""

    base_dim: int = 96
    decoder_base_dim: int | None = None
    """Channels at full size; None: `base_dim`."""
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    """Channels of each level in units of `base_dim`, from full size to the latents' size."""
    res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    """For each level except the last: whether the encoder halves time after it."""
    latents_mean: tuple[float, ...] = (
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    )
    """Mean of each latent channel; the transformer works on latents normalized by it."""
    latents_std: tuple[float, ...] = (
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    )
    out_channels: int = 3

    def __post_init__(self) -> None:
        for name in ("latents_mean", "latents_std"):
            if (length := len(getattr(self, name))) != self.z_dim:
                raise ModelConfigError(f"vae {name}: length {length}, must be z_dim ({self.z_dim})")
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise ModelConfigError(
                f"vae temperal_downsample: length {len(self.temporal_downsample)}, must be one less than "
                f"that of dim_mult ({len(self.dim_mult)})"
            )

    @property
    def decoder_dim(self) -> int:
        """Channels of the decoder at full size."""
        return self.base_dim if self.decoder_base_dim is None else self.decoder_base_dim

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> WanVaeConfig:
        """Read a decoded `config.json`; keys that do not concern the decoder are ignored.

        Raises `ModelConfigError` for another architecture and for sizes that do not fit together.
        """
        for key, allowed in _SETTLED.items():
            if values.get(key, allowed[0]) not in allowed:
                raise ModelConfigError(f"vae {key}: {values[key]!r} must be {allowed[0]!r} (Wan 2.1)")
        known = {ours: values[theirs] for theirs, ours in _THEIRS.items() if theirs in values}
        tuples: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in known.items()}
        return cls(**tuples)
