"""Proposed migrations of live sessions, and the interface of rebalancers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from turboserve.scheduler.placement.cluster import Cluster


class MigrationKind(StrEnum):
    """Why a session should migrate."""

    BALANCE = "balance"
    """The worst chunk latency of the model falls by more than the migration costs."""
    SPREAD = "spread"
    """Too many workers share the bottleneck for it to fall. The migration relieves one of them, and the
    target stays no slower than the source becomes. So new workers get sessions."""
    DRAIN = "drain"
    """The session's worker is draining. The migration is proposed whatever it gains."""


@dataclass(frozen=True)
class Migration:
    """A proposal to migrate one session."""

    session: str
    source: str
    target: str
    gain_s: float
    """Γ = L − L′ − η κ, seconds; positive except for drains. Migrations that lower the bottleneck only
    together share their gain equally. For a spread, L is taken over source and target."""
    cost_s: float
    """κ: expected seconds of the transfer, by the α–β model."""
    reason: str
    """A sentence for the decision log."""
    kind: MigrationKind = MigrationKind.BALANCE
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Latencies, sessions and bytes behind the proposal, for the decision log."""


class Rebalancer(Protocol):
    """Proposes migrations (TurboServe, 5.2.1: migration-aware min-max rebalancing).

    - The result depends only on the arguments: the same cluster and time give the same migrations in the same
      order.
    - Proposals count on migrations under way (`SessionState.target`). A caller that begins a migration puts
      the session with its target into the cluster before the next call.
    - Each session is in at most one migration.
    - A target is ready, not suspect and of the session's model. For an active session it has a free slot even
      if no migration under way ever ends.
    - All migrations of one call may begin at once. They are in the order in which to begin them if not all
      can: drains first, and active sessions before suspended ones.
    """

    def propose(self, cluster: Cluster, now: float) -> list[Migration]: ...


class NeverMigrates:
    """Proposes no migrations; for a scheduler without rebalancing."""

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        return []
