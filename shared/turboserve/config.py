"""Settings that all services share, read from `TURBOSERVE_…` variables. Each service adds its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from turboserve import failover
from turboserve.failover import Failover

PREFIX = "TURBOSERVE_"

Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Settings of every service."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    nats_url: str = "nats://127.0.0.1:4222"
    """URLs of the broker, separated by commas."""
    nats_user: str | None = None
    """Broker user. Defaults to the service's name: the broker has one user per service."""
    nats_password: SecretStr | None = None
    """Password of the broker user. None: the broker requires no password."""
    broker_ping_s: Seconds = 5.0
    """Interval at which a service pings the broker. After two pings without an answer, with the third one, it
    connects again, to another of the broker's servers if `nats_url` has several."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines: text for people, JSON objects for machines."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of log lines that are written."""
    otlp_endpoint: str | None = None
    """OTLP endpoint (HTTP) for traces and metrics. None: metrics are served at `/metrics` only."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the traces of requests that are exported. A client's own `traceparent` decides for its trace.
    Traces with an error are always exported, as far as the process with the error has spans of them."""
    trace_periodic_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the traces of periodic work that are exported: heartbeats, listings, and chunks that follow no
    creation, prompt or migration."""
    health_host: str = "127.0.0.1"
    """Address of the health server."""
    health_port: int = Field(default=0, ge=0, le=65_535)
    """Port of the health server: /healthz, /readyz and /metrics. 0: no health server."""
    failover: Failover = Failover.PATIENT
    """Times within which a frozen process is replaced. `short`: shorter defaults of the settings that say so,
    such as a lease of 2 s, for stacks with two or more of each service."""
    request_deadline_s: Seconds = 3.0
    """Time that a service waits for the answer of another service."""
    canary_timeout_s: Seconds = 5.0
    """A service is not ready when a stream that it uses has stored no canary for this long."""
    heartbeat_s: Seconds = 1.0
    """Interval at which a worker reports its load and renews its lease."""
    lease_s: Seconds = 8.0
    """A worker stops generating when its last renewal is older than this."""
    worker_timeout_s: Seconds = 12.0
    """A worker that has been silent for this long counts as dead. It must exceed `lease_s`; the difference is
    the safety margin."""
    migration_timeout_s: Seconds = 20.0
    """Minimum time allowed for a migration. Large states get more: four times the estimated copy time is
    added."""
    migration_timeout_max_s: Seconds = 3_600.0
    """Maximum time allowed for a migration. A peer that is dead or hangs is noticed within seconds anyway."""

    @model_validator(mode="before")
    @classmethod
    def _failover_times(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return failover.apply(values, cls.model_fields)

    @model_validator(mode="after")
    def _lease_ends_first(self) -> Self:
        if self.lease_s >= self.worker_timeout_s:
            raise ValueError(
                f"worker_timeout_s: {self.worker_timeout_s:g} is not above lease_s, {self.lease_s:g}"
            )
        return self


class SettingsError(Exception):
    """The settings are invalid, and the service does not start. A retry with the same settings fails again.

    `reasons` has one sentence per invalid setting. Each sentence begins with the setting's variable.
    """

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons

    @classmethod
    def of(cls, error: ValidationError) -> SettingsError:
        """Convert a `ValidationError`, leaving out the values, which may be secret."""
        return cls(tuple(_reason(one["loc"], one["msg"]) for one in error.errors(include_input=False)))


def _reason(where: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    # A message about several settings has no location and names the settings itself.
    return f"{PREFIX}{str(where[0]).upper()}: {message}" if where else message
