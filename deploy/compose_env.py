"""Write `.env` for compose.yaml from `.env.example`, once, with random passwords and an API key.

`make compose-env` runs it. An existing `.env` is not changed; it is only checked for missing secrets.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "GENERATED"
KEYS = "TURBOSERVE_API_KEYS"
KEYLESS = "TURBOSERVE_ALLOW_KEYLESS"
TENANT = "default"
_LINE = re.compile(r"^([A-Z][A-Z0-9_]*)=(.*)$", re.MULTILINE)


class EnvironmentFileError(Exception):
    """`.env` cannot be used; the message states what it lacks."""


def generate(example: str) -> str:
    """Return the text of `.env`: `example` with a new secret in place of each GENERATED."""

    def secret(match: re.Match[str]) -> str:
        name, value = match.groups()
        if value != GENERATED:
            return match[0]
        if name == KEYS:
            return f"{name}={new_key()}={TENANT}"
        # The secret starts with a letter; see .env.example.
        return f"{name}=p{secrets.token_hex(24)}"

    return _LINE.sub(secret, example)


def new_key() -> str:
    """Create an API key in the form of `turboserve keys`; this script runs without TurboServe's packages."""
    return f"ts_{secrets.token_hex(4)}_{secrets.token_hex(24)}"


def variables(text: str) -> dict[str, str]:
    """Return the variables of a `.env`; a `#` begins a comment only at the beginning of a line."""
    return dict(_LINE.findall(text))


def first_key(found: dict[str, str]) -> str | None:
    """Return the first API key in `.env`, if it has any."""
    return found.get(KEYS, "").partition(",")[0].rpartition("=")[0] or None


def write(path: Path, example: str) -> bool:
    """Create `path`, readable by its owner alone. If it exists, returns False and changes nothing."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        # The umask does not change the mode.
        os.fchmod(descriptor, 0o600)
        file.write(generate(example))
    return True


def check(path: Path, example: str) -> dict[str, str]:
    """Return the variables of the `.env` at `path`. Raises EnvironmentFileError if a secret is missing."""
    found = variables(path.read_text())
    wanted = [name for name, value in variables(example).items() if value == GENERATED]
    keyless = found.get(KEYLESS) == "1"
    lacking = [name for name in wanted if not found.get(name) and not (name == KEYS and keyless)]
    if lacking:
        raise EnvironmentFileError(
            f"{path} lacks {', '.join(lacking)}: add each with a secret of its own (`openssl rand -hex 24`), "
            f"or move the file away so that a new one is made; see .env.example"
        )
    public = [name for name in wanted if found.get(name, "").startswith("development-")]
    if public:
        raise EnvironmentFileError(f"{path} has a published password as {', '.join(public)}: change it")
    return found


def main() -> int:
    path, example = ROOT / ".env", (ROOT / ".env.example").read_text()
    made = write(path, example)
    try:
        found = check(path, example)
    except EnvironmentFileError as error:
        print(f"compose-env: {error}", file=sys.stderr)
        return 1
    print(f"compose-env: {'wrote' if made else 'kept'} {path.name}")
    if path.stat().st_mode & 0o077:
        print("compose-env: others can read .env: chmod 600 .env", file=sys.stderr)
    key = first_key(found)
    if key is None:
        print("compose-env: no API keys: every client that reaches the port may do everything")
    elif made:
        print(f"compose-env: the API key of the tenant {TENANT}, an operator (it stands in .env): {key}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
