"""What streaming decoders share: a batch's rows are sessions, and each has a cache of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Cache = dict[str, Tensor]
"""Of one session, each part [1, …]."""


def stacked(caches: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """One part of all rows' caches, [B, …]; a single row's as it is, without a copy."""
    return caches[0][name] if len(caches) == 1 else torch.cat([cache[name] for cache in caches])


def keep(caches: Sequence[Cache], name: str, parts: Tensor) -> None:
    """Give each row its part of [B, …], in memory of its own: sessions of one batch may part for ever."""
    for cache, part in zip(caches, torch.split(parts, 1), strict=True):
        cache[name] = part.clone()
