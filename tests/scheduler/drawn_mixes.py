"""Drawn pools of unlike workers, and demand of several classes."""

from __future__ import annotations

from hypothesis import strategies as st

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.scheduler.placement import Kind

CLASSES = tuple(SessionClass(f"m{n}") for n in range(5))
GB = 10**9


@st.composite
def capabilities(draw: st.DrawFn) -> Capability:
    """Draw a capability; some classes are not served, and some kinds have a limit of memory."""
    sessions = {one: draw(st.integers(0, 12)) for one in CLASSES}
    sizes = {one: draw(st.integers(0, 4)) * GB for one in CLASSES}
    return Capability(sessions, sizes, draw(st.sampled_from((0, 0, 8 * GB, 24 * GB))))


@st.composite
def pools(draw: st.DrawFn) -> list[Kind]:
    count = draw(st.integers(1, 4))
    return [Kind(f"k{n}", draw(st.integers(1, 4)), draw(capabilities())) for n in range(count)]


demands = st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 60), min_size=1)
