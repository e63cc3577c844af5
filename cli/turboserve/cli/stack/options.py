"""Options of `turboserve up`, from its command line and from environment variables."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from turboserve.autoscaler.pool_file import PoolFile
from turboserve.cli.stack.decode_pool import DECODE_WORKER
from turboserve.plugins import NotInstalledError
from turboserve.worker.replicas.models import InvalidModelError, check_models

DEFAULT_PORT = 8080
MODULES = {
    "state-store": "turboserve.state_store",
    "scheduler": "turboserve.scheduler",
    "autoscaler": "turboserve.autoscaler",
    "recorder": "turboserve.recorder",
    "gateway": "turboserve.gateway",
}
"""Service → the module that `python -m` runs. The autoscaler starts the workers."""
WEBHOOKS = {"webhooks": "turboserve.webhooks"}
"""As `MODULES`, of a stack that sends events to webhooks. It alone calls addresses that tenants choose."""
PREFIXES: dict[str, list[str]] = {}
"""Service, its process or server → prefix of its command, such as `prlimit` or `env`, for benchmarks."""

MOST_WORKERS = 256
NATS_SERVERS = (1, 3, 5)


class InvalidOptionError(ValueError):
    """An option is invalid. The message names the option and the limit."""


class External(BaseSettings):
    """URLs of external servers. An embedded server is started for each URL that is not set."""

    model_config = SettingsConfigDict(env_prefix="TURBOSERVE_", extra="ignore", frozen=True)

    nats_url: str | None = None
    redis_url: SecretStr | None = None
    postgres_url: SecretStr | None = None


@dataclass(frozen=True)
class Workers:
    """Number of workers: `low` at the start and at least, `high` at most."""

    low: int = 1
    high: int = 1

    @classmethod
    def parse(cls, text: str) -> Workers:
        """Parse `3` or `1..4`. Raises InvalidOptionError."""
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
        if match is None:
            raise InvalidOptionError(f"--workers: {text!r} is neither a number nor a range such as 1..4")
        low = int(match[1])
        high = int(match[2]) if match[2] else low
        if not 0 <= low <= high <= MOST_WORKERS:
            raise InvalidOptionError(f"--workers: {text!r} must increase, within 0 to {MOST_WORKERS}")
        return cls(low, high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True)
class PoolOption:
    """The file of `--pool`."""

    path: Path
    file: PoolFile

    @property
    def workers(self) -> Workers:
        """The fewest and the most workers that the pool may have."""
        return Workers(*self.file.limits)

    @classmethod
    def read(cls, path: Path, *, workers: str | None, model: str | None) -> PoolOption:
        """Read the file. Raises InvalidOptionError if it is wrong, or beside options that it replaces."""
        for name, value in (("--workers", workers), ("--model", model)):
            if value is not None:
                raise InvalidOptionError(f"{name}: the file of --pool says it")
        try:
            file = PoolFile.read(path)
            for one in file.models:
                check_models(one)
        except (ValueError, NotInstalledError) as error:
            raise InvalidOptionError(f"--pool: {error}") from None
        if file.limits[1] > MOST_WORKERS:
            raise InvalidOptionError(
                f"--pool: the maximum of all kinds is {file.limits[1]}, above {MOST_WORKERS}"
            )
        return cls(path.absolute(), file)


@dataclass(frozen=True)
class Options:
    """Options of one run of `turboserve up`."""

    data: Path = Path(".turboserve")
    workers: Workers = field(default_factory=Workers)
    port: int | None = None
    """Port of the gateway. None: 8080, or the next free port after it."""
    schedulers: int = 1
    """Number of schedulers. One of them leads, and the others stand by."""
    gateways: int = 1
    """Number of gateways, each with a port of its own. Clients go from one that is silent to another."""
    state_stores: int = 1
    """Number of state stores. They share the requests."""
    nats: int = 1
    """Number of NATS servers: 1, or a cluster of 3 or 5 that replicates the streams."""
    autoscalers: int = 1
    """Number of autoscalers. One of them leads, and the others stand by."""
    auth: bool = False
    """Whether clients need API keys, which are in the database."""
    decode_workers: int = 0
    """Number of decode workers, which decode what the workers denoise. 0: each worker does both."""
    webhooks: bool = False
    """Whether events are sent to webhooks."""
    model: str | None = None
    """Model of the workers, and of sessions that name none. Several, with commas between them: each worker
    serves all of them, and sessions that name none get the first. None: as the environment variables say."""
    pool: PoolOption | None = None
    """Kinds of workers and their models. `workers` has its limits, and `model` is None."""
    log_format: Literal["text", "json"] = "text"
    external: External = field(default_factory=External)

    def __post_init__(self) -> None:
        """Raise InvalidOptionError for an impossible number of NATS servers, an unknown model, or several
        models with decode workers."""
        if self.pool is not None and self.decode_workers:
            raise InvalidOptionError("--decode-workers: the workers of a pool file have no roles")
        if self.model is not None:
            try:
                check_models(self.model)
            except (InvalidModelError, NotInstalledError) as error:
                raise InvalidOptionError(f"--model: {error}") from None
        if self.decode_workers and self.model is not None and "," in self.model:
            raise InvalidOptionError(f"--decode-workers: the workers serve one model, not {self.model}")
        if self.nats not in NATS_SERVERS:
            raise InvalidOptionError(f"--nats: {self.nats} is not 1, 3 or 5: a cluster needs a majority")
        if self.nats > 1 and self.external.nats_url is not None:
            raise InvalidOptionError("--nats: the broker is external, by TURBOSERVE_NATS_URL")

    def model_settings(self, service: str) -> dict[str, str]:
        """Return the settings by which `--model` reaches a service."""
        # The autoscaler passes its own on to the workers.
        settings = {"gateway": "TURBOSERVE_DEFAULT_MODEL", "autoscaler": "TURBOSERVE_MODEL"}
        settings[DECODE_WORKER] = settings["autoscaler"]
        if self.pool is not None:
            # The pool file has the models of workers.
            first, file = self.pool.file.models[0], str(self.pool.path)
            return {
                "gateway": {settings["gateway"]: first},
                "autoscaler": {"TURBOSERVE_POOL_FILE": file},
            }.get(service, {})
        if self.model is None or service not in settings:
            return {}
        return {settings[service]: self.model.partition(",")[0] if service == "gateway" else self.model}

    def prefix(self, process: str, service: str) -> list[str]:
        """Return the words before the command of a process: its own, or else those of its service."""
        return self.prefixes.get(process, self.prefixes.get(service, []))

    @property
    def redundant(self) -> bool:
        """Whether each of these services has a second process, which takes over from a frozen one."""
        return min(self.gateways, self.schedulers, self.state_stores) > 1

    modules: dict[str, str] = field(default_factory=lambda: dict(MODULES))
    prefixes: dict[str, list[str]] = field(default_factory=lambda: dict(PREFIXES))
