"""Why a pool keeps or changes its size, in words.

Most advice is not recorded, so its text is made on demand.
"""

from __future__ import annotations

from turboserve.autoscaler.control.absorption import owed
from turboserve.autoscaler.control.events import Advice, Explain, ScalingAction
from turboserve.contracts.pool import LoadFeedback
from turboserve.wording import counted

# Python 3.11 takes ten times as long for a member of an enumeration as for a global name.
HOLD = ScalingAction.HOLD


def hold(size: int, cause: str, explain: Explain) -> Advice:
    """Advise to keep `size`."""
    return Advice(HOLD, size, cause, explain)


def limited(size: int, which: str) -> Advice:
    """Advise the `which` size, maximum or minimum."""
    return Advice(ScalingAction.LIMITS, size, "limit", lambda: f"the {which} size is {size}")


def needed_by(required: int, capacity: int, target: float, workers: int, basis: str) -> str:
    """Explain a size by the formula."""
    need = counted(required, "session needs", "sessions need")
    return f"{need} ⌈{required} / ({capacity} × {target:g})⌉ = {counted(workers, 'worker')} {basis}"


def one_more(feedback: LoadFeedback) -> str:
    """Explain a worker beyond the formula."""
    return f"{owed(feedback)}, so one more worker is needed"


def in_band() -> str:
    """Explain a pool whose load asks for no other size."""
    return "the load is within the target band"


def too_large(mean: float, target: float, hysteresis: float, held: str) -> str:
    """Explain a scale-in. `held`: see `holds`."""
    return f"mean load {mean:.2f} is below the target {target:.2f} − {hysteresis:.2f}; {held}"


def packed(required: int) -> str:
    """Explain a pool that keeps its size, since no smaller one holds its sessions."""
    return f"fewer workers would not hold {counted(required, 'session')}"


def holds(workers: int, required: int, basis: str, peak: str) -> str:
    """Describe what `workers` hold. `peak`: the peak that they hold, too; empty if another limit counts."""
    return f"{counted(workers, 'worker holds', 'workers hold')} {counted(required, 'session')} {basis}{peak}"
