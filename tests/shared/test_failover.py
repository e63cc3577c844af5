"""Short times of failure detection keep the order that the invariants need, and settings may replace them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.config import Settings
from turboserve.failover import SHORT_TIMES, Failover, apply
from turboserve.gateway.settings import Settings as GatewaySettings
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.state_store.settings import Settings as StoreSettings
from turboserve.worker.settings import Settings as WorkerSettings

KINDS: tuple[type[Settings], ...] = (
    *(AutoscalerSettings, GatewaySettings, SchedulerSettings, StoreSettings, WorkerSettings),
)


def test_every_short_time_is_of_a_setting_and_shorter_than_as_shipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = [kind() for kind in KINDS]
    monkeypatch.setenv("TURBOSERVE_FAILOVER", "short")
    short = [kind() for kind in KINDS]
    for name, value in SHORT_TIMES.items():
        declaring = [at for at, kind in enumerate(KINDS) if name in kind.model_fields]
        assert declaring, name
        for at in declaring:
            assert getattr(short[at], name) == value < getattr(shipped[at], name)


def test_a_time_that_is_set_replaces_the_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSERVE_FAILOVER", "short")
    monkeypatch.setenv("TURBOSERVE_WORKER_TIMEOUT_S", "7.5")
    settings = SchedulerSettings()
    assert (settings.worker_timeout_s, settings.lease_s) == (7.5, SHORT_TIMES["lease_s"])
    assert SchedulerSettings(failover=Failover.SHORT, lease_s=2.5).lease_s == 2.5


@pytest.mark.parametrize("kind", KINDS)
def test_no_short_time_without_the_setting(kind: type[Settings]) -> None:
    assert apply({"lease_s": 4.0}, kind.model_fields) == {"lease_s": 4.0}
    assert kind().lease_s == kind.model_fields["lease_s"].default


def test_several_renewals_fit_into_a_short_lease_and_leave_a_margin() -> None:
    """A renewal that reaches a frozen state store is lost, so the lease has time for three."""
    times = SHORT_TIMES
    assert 3 * max(times["heartbeat_s"], times["lease_s"] / 3) <= times["lease_s"]
    assert times["worker_timeout_s"] - times["lease_s"] >= 1.0
    assert 3 * times["leader_renew_s"] < times["leader_lease_s"] < times["leader_timeout_s"]


def test_a_worker_timeout_within_the_lease_is_refused() -> None:
    with pytest.raises(ValidationError, match="worker_timeout_s: 2 is not above lease_s, 2"):
        Settings(lease_s=2.0, worker_timeout_s=2.0)
