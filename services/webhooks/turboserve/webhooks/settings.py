"""Settings of the webhooks service, read from `TURBOSERVE_…` variables."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from turboserve.config import Seconds
from turboserve.config import Settings as Shared
from turboserve.webhooks.core.addresses import AddressRules, Network


class Settings(Shared):
    """How events are sent to receivers, and which receivers are called."""

    webhook_key: Annotated[SecretStr, Field(min_length=16)] | None = None
    """Master key of the deployment, at least 16 random characters, from which the secrets of all webhooks
    derive. With another key, all secrets are others. Required."""
    webhook_timeout_s: Annotated[float, Field(gt=0, le=30)] = 10.0
    """Time that a receiver has for the whole answer, name resolution and connection included, seconds."""
    webhook_sends: int = Field(default=64, ge=1, le=1_024)
    """Maximum number of attempts of this process at the same time, over all webhooks."""
    webhook_poll_s: Seconds = 0.5
    """Interval at which deliveries that are due are asked for while there are none."""
    webhook_http_loopback: bool = False
    """Also send to `http://` addresses of this machine, for development."""
    webhook_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """If set, only these hosts are called, separated by commas: `hooks.example.com`, `*.example.com`."""
    webhook_networks: Annotated[tuple[Network, ...], NoDecode] = ()
    """Networks that are called although their addresses are not public, separated by commas: `10.1.0.0/16`.
    Empty: only public addresses are called."""
    webhook_ca_file: Path | None = None
    """File with further certificates of authorities that receivers may have, PEM."""

    @field_validator("webhook_hosts", "webhook_networks", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())

    @field_validator("webhook_hosts")
    @classmethod
    def _lower(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(host.lower().removesuffix(".") for host in value)

    @field_validator("webhook_networks", mode="before")
    @classmethod
    def _networks(cls, value: object) -> object:
        return tuple(map(ipaddress.ip_network, value)) if isinstance(value, tuple) else value

    @property
    def address_rules(self) -> AddressRules:
        return AddressRules(self.webhook_http_loopback, self.webhook_hosts, self.webhook_networks)
