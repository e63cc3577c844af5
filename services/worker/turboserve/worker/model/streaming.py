"""Common part of streaming decoders: a batch's rows are sessions, and each has its own cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Cache = dict[str, Tensor]
"""Cache of one session, each part [1, …]."""


def stacked(caches: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """One part of all rows' caches, [B, …]. A single row's part is returned without a copy."""
    return caches[0][name] if len(caches) == 1 else torch.cat([cache[name] for cache in caches])


def keep(caches: Sequence[Cache], name: str, parts: Tensor) -> None:
    """Copy to each row its part of [B, …]: sessions of one batch may be in different batches afterwards."""
    for cache, part in zip(caches, torch.split(parts, 1), strict=True):
        cache[name] = part.clone()
