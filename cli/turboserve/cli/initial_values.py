"""The option `--control NAME=VALUE` of `turboserve session create`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from turboserve.cli.errors import failure


def initial_values(texts: Iterable[str]) -> dict[str, Any]:
    """Return the values by name: JSON if the text is JSON, else the text; `@FILE` is that file in base64."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise failure(f"--control: {text!r} is not NAME=VALUE")
        if value.startswith("@"):
            try:
                values[name] = base64.b64encode(Path(value[1:]).read_bytes()).decode()
            except OSError as error:
                raise failure(f"--control: {name}: {error}") from None
            continue
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
