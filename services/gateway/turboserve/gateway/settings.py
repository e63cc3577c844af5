"""The gateway's settings."""

from __future__ import annotations

from typing import Annotated

import orjson
from pydantic import Field, SecretStr, TypeAdapter, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from turboserve.audience import SILENT_S
from turboserve.config import Seconds
from turboserve.config import Settings as Shared
from turboserve.contracts.base import Id

_TENANTS: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, Id])


class Settings(Shared):
    """Read from `TURBOSERVE_…` variables, e.g. `TURBOSERVE_GATEWAY_PORT`."""

    # A mistyped list of keys must not end up in a log.
    model_config = SettingsConfigDict(hide_input_in_errors=True)

    gateway_host: str = "127.0.0.1"
    """Address that the API listens on; `0.0.0.0` in a container."""
    gateway_port: int = Field(default=8080, ge=0, le=65_535)
    """0: any free port; the log says which."""
    default_model: Id = "toyworld"
    """For sessions that name none."""
    api_keys: Annotated[SecretStr, NoDecode] = SecretStr("")
    """`key=tenant,key=tenant` or a JSON object; none: everyone is the tenant `default`."""
    operators: Annotated[tuple[str, ...], NoDecode] = ()
    """Tenants that may give orders about the pool and move anybody's sessions, separated by commas; none:
    nobody where there are keys, everybody where there are none."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Other origins whose pages may call the API, separated by commas; `*`: any."""
    body_limit_bytes: int = Field(default=64 * 1024, ge=1024)
    """Of a request's body and of a WebSocket message."""
    stream_limit: int = Field(default=1_000, ge=1)
    """Streams (video and events) that this gateway serves at once."""
    bad_message_limit: int = Field(default=32, ge=1)
    """Broken WebSocket messages before the connection is closed."""
    playhead_interval_s: Annotated[float, Field(gt=0, le=SILENT_S / 4)] = 0.25
    """Playheads are published this often while someone watches."""
    report_timeout_s: Seconds = 5.0
    """A viewer who has not reported for this long no longer moves the playhead."""
    events_keepalive_s: Seconds = 15.0
    """A comment after this much silence keeps proxies from closing an event stream."""

    @field_validator("cors_origins", "operators", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())
        return value

    def may_order(self, tenant: str) -> bool:
        """Whether `tenant` may give orders about the pool, and move the sessions of all."""
        return tenant in self.operators if self.operators else not tenants_by_key(self.api_keys)

    @field_validator("api_keys")
    @classmethod
    def _readable(cls, value: SecretStr) -> SecretStr:
        tenants_by_key(value)
        return value


def tenants_by_key(keys: SecretStr) -> dict[str, str]:
    """API key → tenant. Raises ValueError (never with a key in it) for what cannot be read."""
    text = keys.get_secret_value().strip()
    try:
        if text.startswith("{"):
            pairs = orjson.loads(text)
        else:
            pairs = dict(part.strip().split("=", 1) for part in text.split(",") if part.strip())
        return _TENANTS.validate_python(pairs)
    except ValueError:
        raise ValueError("api_keys: neither key=tenant,key=tenant nor a JSON object of such") from None
