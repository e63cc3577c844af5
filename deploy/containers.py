"""Finds the container engine of this machine: docker or podman, and its compose."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


class EngineError(Exception):
    """No engine can be used; the message states what was searched for and what to do."""


@dataclass(frozen=True)
class Engine:
    """The commands to build an image and to run compose, as words."""

    build: tuple[str, ...]
    compose: tuple[str, ...]

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Engine:
        """Return `BUILD` and `COMPOSE` if set, else docker if its daemon answers, else podman.

        Raises EngineError if there is none.
        """
        build = tuple(shlex.split(environment.get("BUILD", "")))
        compose = tuple(shlex.split(environment.get("COMPOSE", "")))
        if not build or not compose:
            found = _docker() or _podman()
            if found is None:
                raise EngineError(
                    "neither docker (with a daemon that answers, and its compose plugin) nor podman (with "
                    "podman-compose) was found: install one, or give the commands with BUILD= and COMPOSE="
                )
            build, compose = build or found.build, compose or found.compose
        return cls(build, compose)


def _docker() -> Engine | None:
    if not _works("docker", "info"):
        return None
    if _works("docker", "compose", "version"):
        return Engine(("docker", "build"), ("docker", "compose"))
    if _works("docker-compose", "version"):
        return Engine(("docker", "build"), ("docker-compose",))
    return None


def _podman() -> Engine | None:
    if not _works("podman", "info"):
        return None
    build = ("podman", "build")
    if _works("podman-compose", "--version"):
        return Engine(build, ("podman-compose",))
    if _works("podman", "compose", "version"):
        return Engine(build, ("podman", "compose"))
    return None


def prepare_network() -> str | None:
    """Prepare podman's network: netavark calls iptables, which Debian does not install with podman.

    Installs iptables if possible. Returns what was done or is missing; None if there is nothing to report.
    """
    if _works("docker", "info") or shutil.which("podman") is None:
        return None
    backend = subprocess.run(
        ("podman", "info", "--format", "{{.Host.NetworkBackend}}"),
        capture_output=True,
        text=True,
        check=False,
    )
    if backend.stdout.strip() != "netavark" or shutil.which("iptables", path=SYSTEM_PATH) is not None:
        return None
    if os.geteuid() == 0 and shutil.which("apt-get") is not None:
        install = ("apt-get", "install", "-y", "-q", "--no-install-recommends", "iptables")
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        if run(install, environment, quiet=True, check=False).returncode == 0:
            return "installed iptables, which podman's network needs"
    return "iptables is not installed: if containers have no network, that is why"


def _works(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run(
    command: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command and wait. With `quiet`, output is kept, and shown only if the command fails."""
    # Podman's own image format has no health checks; docker ignores this variable.
    everything = {**os.environ, "BUILDAH_FORMAT": "docker", **environment}
    done = subprocess.run(
        command,
        env=everything,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        check=False,
    )
    if check and done.returncode:
        tail = "\n".join((done.stdout or "").splitlines()[-60:])
        raise EngineError(f"{shlex.join(command)} failed with status {done.returncode}\n{tail}".rstrip())
    return done
