"""The tenants of a simulated deployment: limits that a seed draws, and the checks of these limits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.settings import Scale
from turboserve.state_store.core.tenants import ROW_BYTES, TenantLimits, text_bytes

SEVERAL_IN = 0.3
"""Share of the seeds with several tenants."""


def with_tenants(scale: Scale, seed: int) -> Scale:
    """Return the deployment with its tenants and their limits. The draws are independent of all others."""
    chance = random.Random(f"tenants {seed}")
    if chance.random() >= SEVERAL_IN:
        return scale
    return replace(
        scale,
        tenants=chance.choice((2, 3)),
        tenant_limits={
            "tenant_sessions": chance.choice((0, 2, 4)),
            "tenant_suspended": chance.choice((0, 1, 3)),
            "tenant_slots": chance.choice((0, 1, 3)),
            "tenant_slots_factor": chance.choice((0.0, 1.0, 3.0)),
            "tenant_creations_per_minute": chance.choice((0, 3, 20)),
            "tenant_prompts_per_minute": chance.choice((0, 3, 20)),
            "tenant_stored_bytes": chance.choice((0, 3_200, 20_000)),
        },
    )


class TenantReports(Protocol):
    """Where the checks of tenants report to."""

    def fail(self, name: str, message: str) -> None:
        """Report a violation of the invariant `name`."""


class TenantsDeployment(Protocol):
    """The deployment as the checks of tenants use it."""

    loop: VirtualLoop
    scale: Scale
    postgres: MemoryPostgres

    def records(self) -> Iterator[SessionRecord]: ...
    def most_slots(self) -> int: ...


class TenantChecks:
    """Counts each tenant's sessions, creations, prompts and bytes from rows, without the store's counters."""

    def __init__(self, reports: TenantReports, deployment: TenantsDeployment) -> None:
        self._reports, self._deployment = reports, deployment
        self._limits: TenantLimits | None = None
        self.equal_clocks = True
        """Whether the wall clocks of the store's instances agree, so that rates can be checked."""
        self._taken: Counter[tuple[str, str]] = Counter()
        """Tenant and kind → number of creations or prompts that are committed."""
        self._suspended_since: dict[str, float] = {}
        """Tenant → time since which it has as many suspended sessions as it may, or more."""

    @property
    def limits(self) -> TenantLimits:
        if self._limits is None:
            self._limits = self._deployment.scale.store().tenant_limits
        return self._limits

    def committed(self, before: SessionRecord | None, after: SessionRecord) -> None:
        """Check a committed row of a session."""
        if self._deployment.scale.tenants < 2:
            return
        tenant, limits = after.tenant, self.limits
        if before is None:
            self._take(tenant, "creations", 1, limits.creations_per_minute)
            self._created(after)
        elif after.control_seq > before.control_seq:
            self._take(tenant, "prompts", after.control_seq - before.control_seq, limits.prompts_per_minute)
        if demands(after) and (before is None or not demands(before)):
            self._demanded(after)
        self._count_suspended(tenant)

    def lost(self, after: SessionRecord, before: SessionRecord | None) -> None:
        """Count a commit back that a crash of the database reverted, with the tenant's row."""
        tenant = after.tenant
        if before is None:
            self._taken[tenant, "creations"] -= 1
        else:
            self._taken[tenant, "prompts"] -= max(0, after.control_seq - before.control_seq)
        self._suspended_since.pop(tenant, None)

    def _take(self, tenant: str, kind: str, count: int, per_minute: int) -> None:
        """Check a rate: a bucket that was full at the beginning has had this many tokens by now."""
        self._taken[tenant, kind] += count
        most = per_minute * (1.0 + self._deployment.loop.time() / 60.0)
        if per_minute and self.equal_clocks and self._taken[tenant, kind] > most + 1e-6:
            self._fail(f"{tenant} has {self._taken[tenant, kind]} {kind}, and {most:.1f} are allowed by now")

    def _created(self, record: SessionRecord) -> None:
        limits, tenant = self.limits, record.tenant
        rows = [row for row in self._deployment.records() if row.tenant == tenant]
        live = sum(not row.phase.ended for row in rows)
        if limits.sessions and live > limits.sessions:
            self._fail(f"{tenant} has {live} sessions of {limits.sessions}")
        # The newest prompts and the rows alone, so no more than the store counts.
        stored = sum(ROW_BYTES + text_bytes(row.prompt) for row in rows)
        if limits.stored_bytes and stored > limits.stored_bytes:
            self._fail(f"{tenant} stores {stored} of {limits.stored_bytes} bytes")
        since = self._suspended_since.get(tenant)
        # A session may be suspended between the count and the commit.
        settled_s = self._deployment.scale.store().transaction_deadline_s
        if since is not None and self._deployment.loop.time() - since > settled_s:
            self._fail(f"{tenant} creates a session with {limits.suspended} suspended ones or more")

    def _demanded(self, record: SessionRecord) -> None:
        limits, tenant = self.limits, record.tenant
        wanting = [row.tenant for row in self._deployment.records() if demands(row)]
        ours = wanting.count(tenant)
        if limits.slots and ours > limits.slots:
            self._fail(f"{tenant} has {ours} slots of {limits.slots}")
        others = any(name != tenant for name in self._deployment.postgres.tables.tenants.rows)
        left = max(self._deployment.most_slots() - (len(wanting) - 1), 0)
        if limits.slots_factor and others and ours - 1 >= limits.slots_factor * left:
            self._fail(f"{tenant} has {ours} slots, and {left} are left for others")

    def _count_suspended(self, tenant: str) -> None:
        limit = self.limits.suspended
        count = sum(_is_suspended(row) for row in self._deployment.records() if row.tenant == tenant)
        if not limit or count < limit:
            self._suspended_since.pop(tenant, None)
        else:
            self._suspended_since.setdefault(tenant, self._deployment.loop.time())

    def _fail(self, message: str) -> None:
        self._reports.fail("tenant_limits", message)


def demands(record: SessionRecord) -> bool:
    """Return whether the session holds a slot or waits for one."""
    waits = record.phase is Phase.SUSPENDED and record.activity is Activity.WATCHING
    return waits or record.phase.holds_slot or record.phase is Phase.REQUESTED


def _is_suspended(record: SessionRecord) -> bool:
    return record.phase is Phase.SUSPENDED and record.activity is not Activity.WATCHING
