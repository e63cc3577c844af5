"""Tables of the history of pools. Their rows are deleted after a time, or when there are too many."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Identity, Index, Integer, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from turboserve.state_store.access_tables import metadata

pool_samples = Table(
    "pool_samples",
    metadata,
    # One row per pool and step. `at`: when the step began, Unix seconds. `contracts.pool_history.PoolSample`
    # documents the other columns.
    Column("pool", Text, primary_key=True),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("ready", BigInteger, nullable=False),
    Column("starting", BigInteger, nullable=False),
    Column("draining", BigInteger, nullable=False),
    Column("target", BigInteger, nullable=False),
    Column("capacity", BigInteger),
    Column("required", BigInteger),
    Column("waiting", BigInteger),
    Column("rho_max", Double),
    Column("quality_debt", Double),
    Column("deficit", Double),
    Column("volatility", Double),
    Column("target_utilization", Double),
    Index("pool_samples_at", "at"),
)

pool_decisions = Table(
    "pool_decisions",
    metadata,
    # `process` and `process_number`: the autoscaler's process, and the number of the decision in it.
    Column("pool", Text, primary_key=True),
    Column("process", Text, primary_key=True),
    Column("process_number", BigInteger, primary_key=True, autoincrement=False),
    Column("number", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", BigInteger),
    Column("previous", BigInteger),
    Column("advice", BigInteger),
    Column("member", Text),
    Column("worker", Text),
    Column("reason", Text, nullable=False),
    Column("numbers", JSONB, nullable=False, server_default=text("'{}'")),
    Index("pool_decisions_at", "at"),
)

worker_chunks = Table(
    "worker_chunks",
    metadata,
    # One row per worker and step. `core.chunk_history` documents `body`.
    Column("worker", Text, primary_key=True),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("chunks", Integer, nullable=False),
    Column("late", Integer, nullable=False),
    Column("lowered", Integer, nullable=False),
    Column("body", Text, nullable=False),
    Index("worker_chunks_at", "at"),
)

pool_costs = Table(
    "pool_costs",
    metadata,
    # What one minute has cost. `pool` '': workers that no pool started. `tenant` '': no session held a slot.
    Column("pool", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("gpu_seconds", Double, nullable=False),
    Column("money", Double, nullable=False),
    Index("pool_costs_at", "at"),
)

pool_model_costs = Table(
    "pool_model_costs",
    metadata,
    # The same by model instead of tenant. `model` '': no session held a slot.
    Column("pool", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("gpu_seconds", Double, nullable=False),
    Column("money", Double, nullable=False),
    Index("pool_model_costs_at", "at"),
)
