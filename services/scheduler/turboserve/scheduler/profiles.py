"""When a reported latency profile differs from the known one by more than noise."""

from __future__ import annotations

from collections.abc import Mapping

from turboserve.scheduler.placement.pool import LatencyCurve

NOISE = 0.1
"""Relative change of a measured latency that counts as a change. Workers refine their profiles with every
chunk, and noise must not cause migrations."""


def profiles_differ(profile: Mapping[int, float], known: Mapping[int, float]) -> bool:
    """Whether a reported profile differs from the known one by more than noise. An empty one does not."""
    return bool(profile) and (
        profile.keys() != known.keys()
        or any(abs(seconds - known[b]) > NOISE * known[b] for b, seconds in profile.items())
    )


def curves_differ(profile: Mapping[int, float], known: Mapping[int, float]) -> bool:
    """Whether the curves through two profiles differ by more than noise at any batch size of either.

    A batch size that is measured for the first time and that lies on the known curve is no difference.
    """
    if not known:
        return True
    curve, before = LatencyCurve(profile, max(profile)), LatencyCurve(known, max(known))
    return any(abs(curve(b) - before(b)) > NOISE * before(b) for b in profile.keys() | known.keys())
