"""Parses the keys that the setting `TURBOSERVE_API_KEYS` lists. Only their hashes are kept."""

from __future__ import annotations

import json

from pydantic import TypeAdapter, ValidationError

from turboserve.contracts.base import Id
from turboserve.gateway.auth.hashing import KeySet, StoredKey, check_key, new_id

_TENANT: TypeAdapter[str] = TypeAdapter(Id)


def parse(text: str) -> KeySet:
    """Parse `key=tenant,key=tenant` or a JSON object into hashed keys; the result may be empty.

    Raises ValueError for a key that is too short, listed twice or without a tenant. The message has no key.
    """
    pairs = _json_pairs(text) if text.strip().startswith("{") else _list_pairs(text)
    empty = KeySet()
    found: dict[str, StoredKey] = {}
    for number, (key, tenant) in enumerate(pairs, 1):
        try:
            check_key(key)
            _TENANT.validate_python(tenant, strict=True)
        except ValidationError:
            raise ValueError(
                f"the tenant of entry {number} is no id: 1 to 64 letters, digits, '_' or '-'"
            ) from None
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from None
        digest = empty.hash_of(key)
        if digest in found:
            raise ValueError(f"entry {number} repeats the key of an earlier one")
        found[digest] = StoredKey(id=new_id(), tenant=tenant, hash=digest)
    return KeySet(salt=empty.salt, keys=tuple(found.values()))


def _list_pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for number, part in enumerate(filter(str.strip, text.split(",")), 1):
        # A tenant contains no '=', and a key may end with '='.
        key, separator, tenant = part.strip().rpartition("=")
        if not (key and separator and tenant):
            raise ValueError(f"entry {number} is not KEY=TENANT")
        pairs.append((key, tenant))
    return pairs


def _json_pairs(text: str) -> list[tuple[str, str]]:
    # Read as pairs: a dictionary would silently keep the last of two equal keys.
    try:
        pairs: list[tuple[str, str]] = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        raise ValueError("begins like a JSON object and is none") from None
    if any(not isinstance(tenant, str) for _, tenant in pairs):
        raise ValueError("the JSON object must map each key to the name of a tenant")
    return pairs
