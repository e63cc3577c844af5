"""The classes of sessions that a simulated deployment serves: one, or what its seed draws of two."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from turboserve.simulation.runtime.device.profile import DeviceProfile

MODEL = "toyworld"
"""The class of a deployment that serves one."""
NAMES = (MODEL, "toyworld-small")
SESSIONS = (1, 2, 3, 4)
"""Choices for n_j. Those of two classes differ."""
OUTSIDE_IN = 0.4
"""Share of the seeds with workers outside the pool that serve other classes than the pool's, or in another
order."""
SECOND = {"forward_s": {1: 0.02, 4: 0.08}, "state_bytes": 9_000}
"""What devices declare for the second class, unlike the first one's."""


@dataclass(frozen=True)
class SessionClasses:
    """The classes of a deployment whose workers serve several."""

    sessions: Mapping[str, int]
    """n_j: class → number of sessions that a worker serves of it alone. The pool's workers serve all, in this
    order."""
    outside: tuple[tuple[str, ...], ...] = ()
    """Classes of each worker outside the pool."""
    behavior: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {NAMES[1]: SECOND})
    """Class → fields of `DeviceProfile`, where they are not the default."""

    @property
    def first(self) -> str:
        """The first class of the pool's workers."""
        return next(iter(self.sessions))

    def profile(self, model: str, profile: DeviceProfile) -> DeviceProfile:
        """Return `profile` for sessions of a class."""
        slabs, more = self.sessions[model], self.behavior.get(model, {})
        return replace(profile, slabs=slabs, host_states=2 * slabs, **more)  # type: ignore[arg-type]


def draw_classes(seed: int) -> SessionClasses:
    """Draw two classes. The draws are independent of all others of the seed."""
    chance = random.Random(f"models {seed}")
    names = chance.sample(NAMES, 2)
    sessions = dict(zip(names, chance.sample(SESSIONS, 2), strict=True))
    kinds = ((names[0],), (names[1],), (names[1], names[0]))
    outside = [chance.choice(kinds) for _ in range(chance.choice((1, 2)))]
    return SessionClasses(sessions, tuple(outside) if chance.random() < OUTSIDE_IN else ())
