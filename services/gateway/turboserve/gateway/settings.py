"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from turboserve.audience import LONGEST_INTERVAL_S
from turboserve.config import Seconds
from turboserve.contracts.base import Id, is_id
from turboserve.gateway.addresses import origins_of, parse_address
from turboserve.gateway.auth import key_file, key_list
from turboserve.gateway.auth.access import is_loopback, parse_host, parse_origin
from turboserve.gateway.auth.hashing import KeySet
from turboserve.gateway.ice_servers import is_relay, parse_ice_server
from turboserve.gateway.serving.settings import ServerSettings

KEYLESS = "set TURBOSERVE_ALLOW_KEYLESS=1 to allow this"


class Settings(ServerSettings):
    """Settings of the gateway, read from `TURBOSERVE_…` variables, e.g. `TURBOSERVE_GATEWAY_PORT`."""

    # Error messages do not show the input: a mistyped list of keys must not end up in a log.
    model_config = SettingsConfigDict(hide_input_in_errors=True)

    gateway_host: str = "127.0.0.1"
    """Address that the API listens on; `0.0.0.0` in a container. An address that other machines can reach
    requires API keys or `allow_keyless`."""
    gateway_port: int = Field(default=8080, ge=0, le=65_535)
    """Port of the API. 0 takes any free port, which the log shows."""
    default_model: Id = "toyworld"
    """Model of sessions that name none."""
    api_keys_file: Path | None = None
    """File of hashed API keys, which `turboserve keys` writes; mode 0600. Changes take effect within two
    seconds. None: the keys of `api_keys` apply."""
    api_keys_store: bool = False
    """Whether the API keys are in the database, where `/v1/keys` changes them. Changes take effect within two
    seconds. Excludes `api_keys_file`, `api_keys` and `operators`."""
    api_keys: Annotated[KeySet | None, NoDecode] = None
    """API keys for development: `key=tenant,key=tenant` or a JSON object, with keys of 16 characters or more.
    Only hashes stay in memory. Without `api_keys`, `api_keys_file` and `api_keys_store`, no key is needed and
    every caller is the tenant `default`."""
    operators: Annotated[tuple[str, ...], NoDecode] = ()
    """Tenants that may control the pool and migrate every tenant's sessions, separated by commas. Keys made
    with `--operator` have the same rights. If this is empty, only those keys do; a gateway without keys then
    gives the rights to every caller."""
    allow_keyless: bool = False
    """Start without API keys even if other machines can reach the address, `api_keys` is set and lists none,
    or `operators` is set."""
    ticket_lifetime_s: Annotated[float, Field(ge=1, le=600)] = 60.0
    """Time in which a ticket can open a stream, seconds. The stream itself lasts longer."""
    key_failures_per_minute: int = Field(default=30, ge=1, le=10_000)
    """Wrong API keys per minute from one address that are answered 401; further ones are answered 429."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Host names under which clients call this gateway, besides `localhost` and its own address, separated by
    commas: `video.example.com`, `*.example.com`; `*`: any. Requests for other names are answered 421."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Other origins whose pages may call the API, separated by commas; `*`: any."""
    gateway_urls: Annotated[tuple[str, ...], NoDecode] = ()
    """Addresses of all gateways as clients reach them, this one included, separated by commas. Clients learn
    them, and leave a gateway that is silent, or whose broker is. Gateways whose broker is silent ask the
    others there. Pages of each may call all. Empty: all share one address."""
    frame_ancestors: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins whose pages may show the player `/embed/…` in a frame, separated by commas; `*`: any. No other
    page of the gateway is ever shown in a frame."""
    body_limit_bytes: int = Field(default=64 * 1024, ge=1024)
    """Maximum size of a request's body and of a WebSocket message, bytes."""
    access_log: bool = False
    """Write one log line for each request when it ends: method, route, status, duration, bytes, tenant, id of
    the API key, id of the request. Probes are left out."""
    stream_limit: int = Field(default=1_000, ge=1)
    """Maximum number of streams (video and events) that this gateway serves at once."""
    tenant_streams: int = Field(default=250, ge=0)
    """Maximum number of streams of one tenant, if there are API keys; more are answered 429. 0: no limit."""
    bad_message_limit: int = Field(default=32, ge=1)
    """Number of invalid WebSocket messages after which the connection is closed."""
    playhead_interval_s: Annotated[float, Field(gt=0, le=LONGEST_INTERVAL_S)] = 0.25
    """Interval at which the playheads of watched sessions are published, seconds."""
    report_timeout_s: Seconds = 5.0
    """A viewer that has not reported for this many seconds no longer moves the playhead."""
    ice_servers: Annotated[tuple[str, ...], NoDecode] = ()
    """STUN and TURN servers for WebRTC, separated by commas: `stun:stun.example.com`,
    `turn:turn.example.com:3478?transport=udp`. The gateway uses them itself, and names them to viewers. None:
    viewers reach the gateway's own addresses over UDP."""
    turn_secret: SecretStr | None = None
    """Secret that the TURN servers of `ice_servers` share with the gateway (coturn: `use-auth-secret`). Each
    viewer gets a name and a password of its own, valid for a day."""
    whep_buffer_s: Annotated[float, Field(ge=0, le=2)] = 0.05
    """Time for which a WebRTC viewer's first chunk waits, seconds. Later chunks may come late by as much
    before playback stalls."""
    whep_window_s: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    """The frames of a WebRTC viewer that are due in one window of this duration are sent together, seconds.
    The viewer's player shows each at its time. Longer windows cost less processor time, and a prompt is shown
    later by about half of a window. 0: each frame is sent when it is due."""
    whep_shared_window_s: Annotated[float, Field(ge=0, le=0.5)] = 0.5
    """The same for a WebRTC viewer whose session has an earlier viewer on this gateway, seconds. A value
    below `whep_window_s` counts as that."""
    events_keepalive_s: Seconds = 15.0
    """Interval at which a silent event stream sends a comment, seconds, so that proxies keep it open."""

    @field_validator("api_keys", mode="before")
    @classmethod
    def _hashed(cls, value: Any) -> Any:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        return key_list.parse(text) if isinstance(text, str) else text

    @field_validator("api_keys_file", mode="before")
    @classmethod
    def _no_file(cls, value: Any) -> Any:
        return value or None

    @field_validator("api_keys_file")
    @classmethod
    def _usable(cls, value: Path | None) -> Path | None:
        if value is not None:
            key_file.read(value)
        return value

    @field_validator(
        "cors_origins",
        "frame_ancestors",
        "gateway_urls",
        "operators",
        "allowed_hosts",
        "ice_servers",
        mode="before",
    )
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        parts = tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())
        if value.strip() and not parts:
            raise ValueError("is set and empty: list at least one, or unset it")
        return parts

    @field_validator("gateway_urls")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_address(address) for address in value)

    @field_validator("cors_origins", "frame_ancestors")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_origin(origin) for origin in value)

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_host(host) for host in value)

    @field_validator("ice_servers")
    @classmethod
    def _ice_servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_ice_server(server) for server in value)

    @field_validator("operators")
    @classmethod
    def _tenants(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for number, tenant in enumerate(value, 1):
            if not is_id(tenant):
                raise ValueError(f"entry {number} is not a tenant: 1 to 64 letters, digits, '_' or '-'")
        return value

    @model_validator(mode="after")
    def _turn_has_a_secret(self) -> Self:
        relays = [server for server in self.ice_servers if is_relay(server)]
        if relays and self.turn_secret is None:
            raise ValueError(f"TURBOSERVE_ICE_SERVERS: {relays[0]} needs TURBOSERVE_TURN_SECRET")
        return self

    @model_validator(mode="after")
    def _keys_are_there(self) -> Self:
        """Refuse settings that look as if keys were meant but leave the gateway without any."""
        keys = self.key_set()
        listed = self.api_keys is not None and bool(self.api_keys.keys)
        sources = {
            "TURBOSERVE_API_KEYS_STORE": self.api_keys_store,
            "TURBOSERVE_API_KEYS": listed,
            "TURBOSERVE_API_KEYS_FILE": self.api_keys_file is not None,
        }
        if len(chosen := [name for name, is_set in sources.items() if is_set]) > 1:
            raise ValueError(f"{chosen[0]} and {chosen[1]} are both set: keep one")
        if self.api_keys_store:
            if self.operators:
                raise ValueError(
                    "TURBOSERVE_OPERATORS: is set with TURBOSERVE_API_KEYS_STORE, where each key has its own "
                    "scopes: unset it"
                )
            return self
        if self.api_keys_file is not None:
            if keys is not None and not keys.keys:
                raise ValueError(
                    f"TURBOSERVE_API_KEYS_FILE: {self.api_keys_file} lists no key: "
                    "`turboserve keys add TENANT` makes one"
                )
            return self
        if listed:
            known = {key.tenant for key in self.api_keys.keys} if self.api_keys else set()
            if unknown := [tenant for tenant in self.operators if tenant not in known]:
                raise ValueError(f"TURBOSERVE_OPERATORS: no key of TURBOSERVE_API_KEYS is {unknown[0]}'s")
            return self
        if self.allow_keyless:
            return self
        if self.api_keys is not None:
            raise ValueError(f"TURBOSERVE_API_KEYS: is set and lists no key; {KEYLESS}")
        if self.operators:
            raise ValueError(f"TURBOSERVE_OPERATORS: is set, and there are no API keys; {KEYLESS}")
        if not is_loopback(self.gateway_host):
            raise ValueError(
                f"TURBOSERVE_GATEWAY_HOST: others can reach {self.gateway_host}, and there are no API keys "
                "(TURBOSERVE_API_KEYS_STORE, TURBOSERVE_API_KEYS_FILE, TURBOSERVE_API_KEYS); "
                f"{KEYLESS}"
            )
        return self

    @property
    def page_origins(self) -> tuple[str, ...]:
        """Other origins whose pages may call the API: `cors_origins`, and the gateways' own pages."""
        return (*self.cors_origins, *(name for url in self.gateway_urls for name in origins_of(url)))

    def key_set(self) -> KeySet | None:
        """Return the keys of the file or of `api_keys`; None if there are none. Raises KeyFileError."""
        if self.api_keys_file is not None:
            return key_file.read(self.api_keys_file)
        return self.api_keys if self.api_keys is not None and self.api_keys.keys else None
