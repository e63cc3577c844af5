"""Which mechanisms the stack of a run uses."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class MechanismSet(StrEnum):
    """Mechanisms of a run."""

    SHIPPED = "shipped"
    """Those that are on as shipped."""
    ALL = "all"
    """Those that are off as shipped, too."""


def settings_of(mechanisms: MechanismSet, folder: Path) -> dict[str, str]:
    """Return the stack's settings. `folder`: a short path for sockets."""
    if mechanisms is MechanismSet.SHIPPED:
        return {}
    return {
        "TURBOSERVE_GATHER_POLICY": "tiers",
        "TURBOSERVE_RESCUE_HORIZON_S": "5",
        "TURBOSERVE_QUALITY_DEBT_LIMIT": "0.05",
        "TURBOSERVE_ABSORB_AT_MAXIMUM": "true",
        "TURBOSERVE_ADMISSION_SLOT_S": "60",
        "TURBOSERVE_SEQUENCE_PARALLEL_DIRECTORY": str(folder / "loans"),
    }
