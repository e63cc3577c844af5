"""`turboserve bench agreement`: the real side, at its smallest."""

from __future__ import annotations

import pytest

from turboserve.experiments.agreement import summary
from turboserve.experiments.agreement.declared import Declared, Size
from turboserve.experiments.agreement.real import run

pytestmark = pytest.mark.stack


def test_new_cores_decide_as_those_of_the_real_stack() -> None:
    size = Size(workers=1, minutes=0.12, sessions=3)
    found = run(Declared(size, "round-robin", 1), settle_s=0.0)
    assert found["chunks"] > 0
    # A forward takes at least its declared time, also on a busy machine.
    assert found["p10_s"] > 5 * 0.06
    assert found["cost_worker_s"] == pytest.approx(size.minutes * 60.0, rel=0.01)
    assert found["decisions"].keys() == {"scheduler", "pool", "controller"}
    assert summary.identical([{"real": found}]), found["decisions"]
