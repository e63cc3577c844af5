"""Messages as a sender of another schema version writes them."""

from __future__ import annotations

import json
from typing import Any

from turboserve.contracts.base import Contract
from turboserve.contracts.versions import MEMBER, SCHEMA_VERSION

NEWER = f"{SCHEMA_VERSION.major + 1}.0"
OLDER = f"{SCHEMA_VERSION.major - 1}.0"


def of_version(message: Contract, version: Any) -> bytes:
    """Return the message with this version; None: without a version."""
    document = json.loads(message.to_bytes())
    del document[MEMBER]
    return json.dumps(document if version is None else {MEMBER: version, **document}).encode()
