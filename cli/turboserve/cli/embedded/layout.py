"""Where a stack keeps its files, and the secrets it made for itself."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from turboserve.cli.embedded.folder import close_files, secure


class Layout:
    """The data directory of one stack. Everything in it is private to its owner."""

    def __init__(self, data: Path) -> None:
        self.data = data.absolute()
        self.logs = self.data / "logs"
        self.lock = self.data / "up.lock"
        self.stack = self.data / "stack.json"
        self.ports = self.data / "ports.json"
        self.secrets = self.data / "secrets.json"

    def create(self) -> list[str]:
        """Make the directories, or make sure that existing ones are private.

        Returns what is worth telling, one sentence each. Raises OSError naming the path, UnsafeFolderError.
        """
        remarks = secure(self.data)
        self.logs.mkdir(exist_ok=True, mode=0o700)
        self.logs.chmod(0o700)
        close_files(self.logs, ["*.log*"], 0o640)
        return remarks

    def server(self, name: str) -> Path:
        """The directory of one server, made when missing."""
        path = self.data / name
        path.mkdir(exist_ok=True, mode=0o700)
        return path

    def secret(self, name: str) -> str:
        """A random password, made at first use and the same ever after: Postgres keeps it in its data."""
        known: dict[str, str] = read_json(self.secrets)
        if name not in known:
            known[name] = secrets.token_urlsafe(24)
            write_private_json(self.secrets, known)
        return known[name]


def read_json(path: Path) -> dict[str, str]:
    """The object in `path`; empty when the file is missing or was cut short by a crash."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def write_private(path: Path, text: str, owner: tuple[int, int] | None = None) -> None:
    """Replace `path` in one step with a file that only its owner may read; None: who runs this process."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        # The folder may be a server's, who could put a link in our way.
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            if owner is not None:
                os.fchown(file.fileno(), *owner)
        new.replace(path)
    except OSError:
        # Half a file is of no use, and takes room on a full disk.
        new.unlink(missing_ok=True)
        raise


def write_private_json(path: Path, value: object) -> None:
    write_private(path, json.dumps(value, indent=2) + "\n")
