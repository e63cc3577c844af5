"""Several tenants under faults: their limits bind, and a store that enforces one of them less is found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.simulation.simulate_plants import is_found, violations
from turboserve.contracts.errors import TenantLimitError
from turboserve.contracts.requests import SessionRef
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway.auth.access import Keys
from turboserve.simulation.faults import CALM
from turboserve.simulation.mechanisms import Mechanisms
from turboserve.simulation.scenario import run_scenario, scale_of
from turboserve.simulation.settings import Scale
from turboserve.simulation.tenant_keys import key_of, key_set
from turboserve.state_store.core import tenants
from turboserve.state_store.service import transactions

UNLIMITED = {
    "tenant_sessions": 0,
    "tenant_suspended": 0,
    "tenant_slots": 0,
    "tenant_slots_factor": 0.0,
    "tenant_creations_per_minute": 0,
    "tenant_prompts_per_minute": 0,
    "tenant_stored_bytes": 0,
}


def limited(**limits: float) -> Scale:
    """Return a deployment with room for all sessions, two tenants and these limits alone."""
    return Scale(workers=2, most_workers=3, slots=3, tenants=2, tenant_limits=UNLIMITED | limits)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the refusals by the limit that they name."""
    count: Counter[str] = Counter()
    raised = TenantLimitError.__init__

    def counted(self: TenantLimitError, *given: Any, **more: Any) -> None:
        count[more["field"]] += 1
        raised(self, *given, **more)

    monkeypatch.setattr(TenantLimitError, "__init__", counted)
    return count


def test_a_share_of_the_seeds_has_several_tenants() -> None:
    drawn = [scale_of(seed, Mechanisms.NONE) for seed in range(300)]
    assert {scale.tenants for scale in drawn} == {1, 2, 3}
    assert 60 < sum(scale.tenants > 1 for scale in drawn) < 120


def test_each_tenants_key_is_its_own() -> None:
    assert key_set(("default",)) is None
    keys = Keys(key_set(("default", "tenant-2")))
    found = [keys.identify(key_of(name)) for name in ("default", "tenant-2", "tenant-3")]
    assert [None if one is None else one.tenant for one in found] == ["default", "tenant-2", None]


def no_charge(row: tenants.Tenant, *_: Any) -> tenants.Tenant:
    return row


def nothing(*_: Any) -> None:
    """Refuse nothing."""


PLANTS = {
    "tenant_sessions": (1, "check_sessions", nothing),
    "tenant_suspended": (1, "check_sessions", nothing),
    "tenant_slots": (1, "check_slot", nothing),
    "tenant_slots_factor": (0.1, "check_slot", nothing),
    "tenant_creations_per_minute": (2, "create", no_charge),
    "tenant_prompts_per_minute": (1, "submit_prompt", no_charge),
    "tenant_stored_bytes": (2_100, "create", no_charge),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_limit_binds_and_a_store_without_it_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, refused: Counter[str]
) -> None:
    limit, enforces, instead = PLANTS[name]
    scale = limited(**{name: limit})
    seed, seconds = (3, 15.0) if name == "tenant_suspended" else (1, 10.0)
    outcome = run_scenario(seed, seconds=seconds, faults=CALM, scale=scale)
    assert outcome.violations == {}, outcome.messages
    assert refused[name] > 0
    monkeypatch.setattr(tenants, enforces, instead)
    assert violations(range(seed, seed + 6), CALM, seconds, scale) == {"tenant_limits"}


def test_a_store_that_shows_sessions_to_other_tenants_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def everyones(record: SessionRecord | None, ref: SessionRef) -> SessionRecord:
        return visible(record, SessionRef(session=ref.session))

    visible = transactions.visible
    monkeypatch.setattr(transactions, "visible", everyones)
    assert is_found("tenants_apart", range(4), CALM, scale=limited())
