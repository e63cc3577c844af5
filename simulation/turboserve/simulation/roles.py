"""Decode workers and text workers of a simulated deployment, and their faults: what a seed draws."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from turboserve.simulation.faults import Faults
from turboserve.simulation.runtime.device.network import PORT
from turboserve.simulation.session_classes import MODEL

DECODE = "decode-worker"
TEXT = "text-worker"
ROLES = {DECODE: "decode", TEXT: "text"}
"""Kind of process → its `TURBOSERVE_ROLES`."""
KEY = "simulated-key-of-the-decode-workers"
"""`TURBOSERVE_DECODE_KEY` of all workers."""
DECODERS = (1, 2, 2, 3)
"""Choices for the number of decode workers."""
TEXTS = (0, 1, 2)
"""Choices for the number of text workers."""
CHUNK_S = (0.03, 0.1, 0.2)
"""Choices for the time of a chunk on a decode worker, of the 0.75 s that it plays."""
ROOMS = (2, 4, 8)
"""Choices for the number of caches of a decode worker."""
UNLIMITED = 32
"""Caches of a decode worker that limits no deployment."""
TIMEOUTS_S = (1.0, 1.0, 2.0)
"""Choices for `TURBOSERVE_DECODE_TIMEOUT_S`. A cache is rebuilt within any of them."""
SHARE = 0.5
"""Share of the seeds with a fault, for each fault and kind of process."""


@dataclass(frozen=True)
class RolePlace:
    """One decode worker or text worker, however often its process is started again."""

    kind: str
    model: str


@dataclass(frozen=True)
class RoleScale:
    """Workers that compute for the pool's, which have the role `denoise` if there are decode workers."""

    decoders: int = 2
    texts: int = 0
    chunk_s: float = 0.1
    """Time of a chunk on a decode worker."""
    room: int = 4
    """Caches for which a decode worker has memory."""
    timeout_s: float = 1.0
    models: tuple[str, ...] = (MODEL,)
    """Models of the pool's workers. Each decode worker and text worker serves one of them, in turn."""

    @property
    def places(self) -> Mapping[str, RolePlace]:
        """These workers, each by the name by which others reach it."""
        models, counts = self.models, {DECODE: self.decoders, TEXT: self.texts}
        return {
            f"{ROLES[kind]}-{number + 1}": RolePlace(kind, models[number % len(models)])
            for kind, count in counts.items()
            for number in range(count)
        }

    def home(self, model: str) -> dict[str, Any]:
        """Return the settings of the pool's workers of a model."""
        by_kind = {
            kind: ",".join(
                f"tcp://{name}:{PORT}"
                for name, place in self.places.items()
                if place == RolePlace(kind, model)
            )
            for kind in ROLES
        }
        return {
            "roles": "denoise" if self.decoders else "denoise,decode",
            "decode_workers": by_kind[DECODE],
            "text_workers": by_kind[TEXT],
            "decode_key": KEY,
            "decode_timeout_s": self.timeout_s,
        }


def draw_roles(seed: int, models: tuple[str, ...] = (MODEL,)) -> RoleScale:
    """Draw the workers. The draws are independent of all others of the seed.

    With several models there are as many for each, which limit none: capacity is then a polytope of its own.
    """
    chance = random.Random(f"roles {seed}")
    drawn = RoleScale(
        decoders=chance.choice(DECODERS),
        texts=chance.choice(TEXTS),
        chunk_s=chance.choice(CHUNK_S),
        room=chance.choice(ROOMS),
        timeout_s=chance.choice(TIMEOUTS_S),
    )
    if (count := len(models)) == 1:
        return drawn
    decoders, texts = count * drawn.decoders, count * drawn.texts
    return replace(drawn, decoders=decoders, texts=texts, models=models, chunk_s=min(CHUNK_S), room=UNLIMITED)


def with_role_faults(faults: Faults, seed: int) -> Faults:
    """Return the faults with those of decode workers, text workers, and of connections between workers.

    The draws are independent of all others of the seed.
    """
    chance = random.Random(f"faults of roles {seed}")

    def drawn(before: Mapping[str, float], *rates: float, kinds: tuple[str, ...] = (DECODE, TEXT)) -> Any:
        chosen = {kind: (chance.choice(rates), chance.random() < SHARE) for kind in kinds}
        return {**before, **{kind: rate for kind, (rate, there) in chosen.items() if there}}

    return replace(
        faults,
        crash_step=drawn(faults.crash_step, 0.0001, 0.001),
        crash=drawn(faults.crash, 0.03, 0.15),
        freeze=drawn(faults.freeze, 0.03, 0.15),
        cut=drawn(faults.cut, 0.03, 0.15),
        isolated=drawn(faults.isolated, 0.03, 0.15, kinds=(DECODE, TEXT, "worker")),
        slow_device=drawn(faults.slow_device, 0.03, 0.1),
        device_lost_of=drawn(faults.device_lost_of, 0.02),
        transfer_fails=max(faults.transfer_fails, chance.choice((0.0, 0.02, 0.1))),
    )
