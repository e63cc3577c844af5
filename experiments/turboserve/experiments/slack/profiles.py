"""Declared devices. Latencies are of forwards by batch size; the simulated engine runs on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.worker.engine.fidelity import Fidelity, most_chunks
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.fidelity_profile import FidelityProfile, MeasuredFidelity

FORWARDS = 5
"""Forwards of a chunk at the best configuration: four denoising steps and the clean pass."""
PAPER_CHUNK_S = 1.0
"""T of the paper's device. SlackServe does not give it; its rate and CPR suggest about 1 s."""
TOYWORLD_FORWARD_S = {1: 0.0062, 2: 0.0095, 4: 0.0166}
TOYWORLD_DECODE_S = 0.010
TOYWORLD_SLOWDOWN = 20.0
"""toyworld takes a twentieth of a chunk's playing time. The factor makes its device as loaded as the paper's,
so that the same rates apply; how much batching gains is as measured."""
TOYWORLD_QUALITY = {4: 0.970, 3: 0.965, 2: 0.968, 1: 0.970}
"""Quality by number of steps (docs/performance.md). The shorter window and sparsity save no time there."""
GRADED_QUALITY = {4: 1.0, 3: 0.995, 2: 0.985, 1: 0.95}
"""Declared quality by number of steps: a loss that grows with each step left out."""
GRADED_FLOOR = 0.98
"""Declared floor: two steps. SlackServe has no configuration with fewer."""
PARALLEL_SHARE = 0.55
"""Time of a forward on two devices, relative to one: the exchange takes a tenth of it. SlackServe's
is not given."""
NOTHING = {1: 0.0}
LARGEST_BATCH = 64


@dataclass(frozen=True)
class SlackProfile:
    """A device, and the start buffer of its viewers."""

    device: DeviceProfile
    chunk_s: float
    """T: time of one chunk alone at the best configuration, seconds."""

    @property
    def start_buffer_s(self) -> float:
        """Time from the request at which a viewer begins to play: 4 × T (SlackServe, Appendix C)."""
        return 4.0 * self.chunk_s


def paper() -> SlackProfile:
    """Return a compute-bound device: no gain by batching, no time for text, recaching, decoding, packaging.

    SlackServe never mentions the time of text encoding and of the VAE.
    """
    forward = PAPER_CHUNK_S / FORWARDS
    device = _device({size: size * forward for size in (1, 2, 4, LARGEST_BATCH)}, 0.0)
    return SlackProfile(replace(device, ladder=ladder(TOYWORLD_QUALITY)), PAPER_CHUNK_S)


def graded() -> SlackProfile:
    """Return `paper` with qualities that fall with each step. They are declared, not measured."""
    profile = paper()
    return replace(profile, device=replace(profile.device, ladder=ladder(GRADED_QUALITY, GRADED_FLOOR)))


def ladder(quality: Mapping[int, float], floor: float | None = None) -> FidelityLadder:
    """Return the configurations with fewer steps, which take as many forwards fewer.

    `quality`: by number of steps. `floor`: None: the median of all qualities, as SlackServe chooses it.
    """
    config = DeviceProfile(denoising=FORWARDS - 1).config
    window = most_chunks(config)
    measured = [
        MeasuredFidelity(Fidelity(steps, window), steps + 1.0, each, (each, each))
        for steps, each in quality.items()
    ]
    best = next(each.quality for each in measured if each.fidelity == Fidelity.best(config))
    profile = FidelityProfile("declared", "virtual", 100, tuple(measured))
    return FidelityLadder.of_profile(profile, config, None if floor is None else floor / best)


def toyworld() -> SlackProfile:
    """Return toyworld's device as measured on a CPU (docs/performance.md), slowed down."""
    forward = {size: TOYWORLD_SLOWDOWN * seconds for size, seconds in TOYWORLD_FORWARD_S.items()}
    decode = TOYWORLD_SLOWDOWN * TOYWORLD_DECODE_S
    device = replace(_device(forward, decode), ladder=ladder(TOYWORLD_QUALITY))
    return SlackProfile(device, FORWARDS * forward[1] + decode)


def _device(forward_s: Mapping[int, float], decode_s: float) -> DeviceProfile:
    return DeviceProfile(
        forward_s=forward_s,
        decode_s={1: decode_s},
        text_s=NOTHING,
        recache_s=NOTHING,
        package_s=0.0,
        denoising=FORWARDS - 1,
        parallel_share=PARALLEL_SHARE,
    )


PROFILES = {"paper": paper, "graded": graded, "toyworld": toyworld}
