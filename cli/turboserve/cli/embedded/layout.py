"""The files of a stack's data directory, and its generated secrets."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from turboserve.cli.embedded.folder import close_files, secure


class Layout:
    """The data directory of one stack. Only its owner can read it."""

    def __init__(self, data: Path) -> None:
        self.data = data.absolute()
        self.logs = self.data / "logs"
        self.lock = self.data / "up.lock"
        self.stack = self.data / "stack.json"
        self.ports = self.data / "ports.json"
        self.secrets = self.data / "secrets.json"
        self.recordings = self.data / "recordings"

    def create(self) -> list[str]:
        """Create the directories, or make existing ones private.

        Returns remarks for the log, one sentence each. Raises UnsafeFolderError, or OSError with the path.
        """
        remarks = secure(self.data)
        self.logs.mkdir(exist_ok=True, mode=0o700)
        self.logs.chmod(0o700)
        close_files(self.logs, ["*.log*"], 0o640)
        return remarks

    def server(self, name: str) -> Path:
        """Return the directory of one server. Creates it if it is missing."""
        path = self.data / name
        path.mkdir(exist_ok=True, mode=0o700)
        return path

    def secret(self, name: str) -> str:
        """Return a random password, created at first use. It never changes: Postgres has it in its data."""
        known: dict[str, str] = read_json(self.secrets)
        if name not in known:
            known[name] = secrets.token_urlsafe(24)
            write_private_json(self.secrets, known)
        return known[name]


def read_json(path: Path) -> dict[str, str]:
    """Read the object in `path`. Returns an empty one if the file is missing or was truncated by a crash."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def write_private(path: Path, text: str, owner: tuple[int, int] | None = None) -> None:
    """Replace `path` atomically with a file that only `owner` may read.

    `owner` has user and group id. None: this process's user.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        # A server may own the folder, and could have put a link here.
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            if owner is not None:
                os.fchown(file.fileno(), *owner)
        new.replace(path)
    except OSError:
        # A partial file is useless, and takes space on a full disk.
        new.unlink(missing_ok=True)
        raise


def write_private_json(path: Path, value: object) -> None:
    write_private(path, json.dumps(value, indent=2) + "\n")
