"""Settings that all services share, read from `TURBOSERVE_…` variables. Each service adds its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "TURBOSERVE_"

Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """What every service needs to join the others."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    nats_url: str = "nats://127.0.0.1:4222"
    """The broker; several, separated by commas."""
    nats_user: str | None = None
    """Defaults to the service's name: the broker has a user per service."""
    nats_password: SecretStr | None = None
    """None: the broker asks for none."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or JSON objects for machines."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lines below this level are not written."""
    otlp_endpoint: str | None = None
    """Where traces and metrics go (OTLP over HTTP); none: metrics at `/metrics` only."""
    health_host: str = "127.0.0.1"
    """Address of the health server."""
    health_port: int = Field(default=0, ge=0, le=65_535)
    """Port for /healthz, /readyz and /metrics; 0: none."""
    request_deadline_s: Seconds = 3.0
    """How long a service waits for another's answer."""
    canary_timeout_s: Seconds = 5.0
    """A service is not ready when a stream that it uses has stored no canary for this long."""
    heartbeat_s: Seconds = 1.0
    """A worker reports and renews this often."""
    lease_s: Seconds = 8.0
    """A worker that has not renewed for this long stops generating."""
    worker_timeout_s: Seconds = 12.0
    """A worker not heard of for this long is taken for dead; more than `lease_s`, by a margin."""
    move_limit_s: Seconds = 20.0
    """A move is given up after this long, be its state ever so small; a larger one is given longer, by its
    size and the pace of the way..."""
    move_limit_most_s: Seconds = 3_600.0
    """...but no longer than this. A peer that is dead or stands still is noticed within seconds anyway."""


class SettingsError(Exception):
    """Settings that a service does not start with. `reasons`: one for each, beginning with its variable."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons

    @classmethod
    def of(cls, error: ValidationError) -> SettingsError:
        """The same without the values, which may be secret."""
        return cls(tuple(_reason(one["loc"], one["msg"]) for one in error.errors(include_input=False)))


def _reason(where: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    # What concerns several settings names them itself.
    return f"{PREFIX}{str(where[0]).upper()}: {message}" if where else message
