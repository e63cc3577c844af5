"""Devices that are too slow for the best configuration of all their sessions."""

from __future__ import annotations

from dataclasses import replace

from turboserve.simulation.runtime.device.pages import state_size
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.worker.engine.fidelity import Fidelity, most_chunks
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung

SLOW_FORWARD_S = {1: 0.1, 4: 0.35}
"""Latencies of a device that is too slow for the best configuration of more than one session."""
SLOWER_FORWARD_S = {1: 0.25, 4: 0.9}
"""Latencies of a device that is too slow for more than one session at the floor, too: rescues take place."""
REAL_TIME_MARGIN = 0.95
"""Share of a chunk's playing time that K sessions' chunks take on a device that absorbs, about."""
FORWARDS_OF = {4: 1.0, 2: 0.6, 1: 0.4}
"""Number of denoising steps → time of a chunk, relative to the best configuration's."""
QUALITIES = {4: 1.0, 2: 0.95, 1: 0.9}
STATE_LAYERS = 4
"""Layers of a state on a device with more sessions than slabs."""
UNEVEN_FORWARD_S = {1: 0.02, 4: 0.08}
"""Latencies of devices whose workers lend them."""
UNEVEN_SLOWDOWN = 6.0
"""How many times longer than declared every other device of such a host computes. It carries one session."""
PARALLEL_SHARE = 0.55
"""Time of a forward that two workers compute together, relative to one on its own."""


def with_host_sessions(profile: DeviceProfile, host_sessions: int, state_copy_s: float) -> DeviceProfile:
    """Return the device with fewer slabs than sessions, if some of them are beyond the slabs."""
    if not host_sessions:
        return profile
    return replace(
        profile,
        slabs=profile.slabs - host_sessions,
        host_bytes_per_s=state_size(profile) / state_copy_s,
        state_layers=STATE_LAYERS,
    )


def forward_of(profile: DeviceProfile, capacity: int) -> dict[int, float]:
    """Return latencies of a device that serves `capacity` sessions in real time, and not one more."""
    chunk_s = REAL_TIME_MARGIN**2 * profile.config.chunk_media_s
    forward_s = (chunk_s - profile.decode_s[1]) / (profile.denoising + 1)
    return {size: forward_s * (0.4 + 0.6 * size / capacity) for size in (1, profile.slabs)}


def ladder_of(profile: DeviceProfile) -> FidelityLadder:
    config = profile.config
    window = most_chunks(config)
    rungs = tuple(
        Rung(Fidelity(steps, window), config.chunk_forwards * share, QUALITIES[steps])
        for steps, share in FORWARDS_OF.items()
    )
    return FidelityLadder(rungs, floor=min(QUALITIES.values()))
