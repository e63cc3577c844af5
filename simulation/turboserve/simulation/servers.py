"""The servers of one simulated deployment, and the network between them and the processes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from turboserve.contracts.sessions import SessionRecord
from turboserve.simulation.faults import CALM, Faults
from turboserve.simulation.runtime.broker import FaultyNetwork, MemoryBroker, Network, Rates
from turboserve.simulation.runtime.device.fabric import FabricFaults, TransferFabric
from turboserve.simulation.runtime.hot import MemoryRedis
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.rows.behavior import PostgresBehavior
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.service import EPOCH_S


class Servers:
    """Broker, Postgres, Redis and the transfers' network, on one virtual loop."""

    def __init__(self, seed: int, faults: Faults, network: Network | None) -> None:
        """Without `network`, messages have the delays and losses of `faults`."""
        self.loop = VirtualLoop(seed)
        network_random = random.Random(f"network {seed}")
        rates = Rates(
            delay_s=faults.delay_s,
            lag_s=faults.lag_s,
            lost_hint=faults.lost_hint,
            doubled_hint=faults.doubled_hint,
            lost_request=faults.lost_request,
            lost_answer=faults.lost_answer,
            late_request=faults.late_request,
        )
        self.network = FaultyNetwork(network_random, rates) if network is None else network
        self.broker = MemoryBroker(network_random, self.network, loop=self.loop, wall_offset_s=EPOCH_S)
        self.postgres = MemoryPostgres(
            PostgresBehavior(
                random.Random(f"postgres {seed}"), statement_s=0.0005, in_doubt=faults.commit_in_doubt
            ),
            self.loop,
        )
        self.hot = MemoryRedis(loop=self.loop)
        self.fabric = TransferFabric(
            self.loop, random.Random(f"transfers {seed}"), delay_s=faults.delay_s / 4
        )
        self.fabric.faults = FabricFaults(breaks=faults.transfer_fails / 8)

    # Faults

    def slow_broker(self, seconds: float) -> None:
        self.broker.slow_down(seconds)

    def lose_hot_store(self) -> None:
        self.hot.crash()
        self.hot.start(empty=True)

    def repair(self) -> None:
        """Repair all servers and the network."""
        self.fabric.faults = FabricFaults()
        if isinstance(self.network, FaultyNetwork):
            self.network.repair()
            self.network.rates = Rates(delay_s=CALM.delay_s, lag_s=CALM.lag_s)
        self.broker.repair()
        self.postgres.disk_full = False
        self.postgres.behavior.in_doubt = 0.0
        self.postgres.freeze(0.0)
        self.postgres.slow_down(0.0, 0.0)
        self.postgres.start()
        self.hot.slow_down(0.0, 0.0)

    # Looking

    def records(self) -> Iterator[SessionRecord]:
        """Return the rows of all sessions, as committed."""
        return (entry.record for entry in self.postgres.tables.sessions.rows.values())

    def decision_of(self, record: SessionRecord) -> str | None:
        """Return the kind of the decision that made this version of the row."""
        decisions = self.postgres.tables.decisions
        for number in decisions.keys("version", (record.id, record.version)):
            return decisions.rows[number].decision.kind
        return None

    def slots_used(self, worker: str) -> int:
        """Count the sessions that hold a slot of the worker or reserve one by migrating to it."""
        return sum(
            worker in (record.worker, record.target) and record.phase.holds_slot for record in self.records()
        )
