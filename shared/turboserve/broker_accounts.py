"""Derives the broker's accounts and permissions from the table of subjects.

Permissions do not limit reply subjects. A requester can name any subject as the reply subject of a JetStream
request, and chooses the answer's body. The broker would send that answer even to the subject of another
service's request or of a stream. Each service therefore has its own account, and this module lists what
passes between two accounts. A subject of one account does not exist in another, and an answer goes back into
the requester's account.

The state store's account is the hub: it has the streams. Within an account, permissions repeat the same
rules.

Workers do not trust each other. A worker's user `worker.IDENTITY` has its own account, and its subjects carry
the identity. The user `worker` is for brokers where all workers share one account.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turboserve.subject_types import Caller, Topic
from turboserve.subjects import ADMIN, CHUNKS, ENDPOINTS, EVENTS, LOGS, SERVICES, TOPICS, inbox_prefix

STORE = "state-store"
WORKER = "worker"
IDENTITY_PATTERN = r"[a-z0-9]{1,32}"
"""Pattern of a worker's identity: one token of a subject, without the `_` that ends it in a worker's id."""
HUB = "STATE_STORE"
"""The state store's account, with the streams and the admin."""
API = "$JS.API"
REPLIES = "_R_.>"
"""Reply subjects of requests from other accounts. The broker chooses them, not the requester."""

STREAMS = (CHUNKS, EVENTS)
BATCHED = f"{API}.DIRECT.GET.{EVENTS}"
"""The only request whose answer consists of several messages."""
BATCH_TIMEOUT_S = 10
"""Silence after which the broker considers such an answer complete."""


NO_API = "none.jetstream"
"""Subject without a server, imported as `$JS.API.INFO` by every account but the hub. The broker gives each
account its own JetStream API unless the account imports `$JS.API.INFO`."""


@dataclass(frozen=True)
class Flow:
    """A subject that passes from one account to another."""

    subject: str
    source: str
    """Account in which the subject is published."""
    target: str
    """Account in which the subject is received."""
    kind: Literal["service", "stream"]
    """Kind of import in NATS's terms. The source imports a service, and gets answers. The target imports a
    stream."""


def account_of(user: str) -> str:
    """Return the account of a broker user: its own, or the state store's for the admin."""
    return (STORE if user == ADMIN else user).upper().replace("-", "_").replace(".", "_")


def worker_user(identity: str) -> str:
    """Return the broker user of a worker's identity. Raises ValueError if `identity` is not one."""
    if not re.fullmatch(IDENTITY_PATTERN, identity):
        raise ValueError(f"identity: {identity!r} does not match {IDENTITY_PATTERN}")
    return Caller(WORKER, identity).token


def permissions(user: str) -> dict[str, list[str]]:
    """Return the subjects that the broker lets `user` publish and subscribe to.

    `user` is a service or `worker.IDENTITY`. Raises ValueError for an unknown service.
    """
    caller = Caller.from_token(user)
    service = caller.role
    if service not in SERVICES or (caller.id is not None and service != WORKER):
        raise ValueError(f"service: {user!r} is not one of {', '.join(SERVICES)}")
    publish = [e.request_subject(user) for e in ENDPOINTS if service in e.callers]
    publish += [topic.of_identity(caller.id) for topic in TOPICS if service in topic.senders]
    publish += [log.of_identity(caller.id) for log in LOGS if service in log.writers]
    publish += _store_api() if service == STORE else _reading_api(service)
    subscribe = [f"{inbox_prefix(user)}.>"]
    subscribe += [topic.of_identity(caller.id) for topic in TOPICS if service in topic.readers]
    subscribe += [log.live("*") for log in LOGS if service in log.readers]
    served = [e.every for e in ENDPOINTS if service == e.server]
    if served:
        subscribe += served
        publish.append(REPLIES)
    if service == STORE:
        # The admin is in this account, so the broker does not rename the reply subjects of its requests.
        publish.append(f"{inbox_prefix(ADMIN)}.>")
    return {"publish": sorted(set(publish)), "subscribe": sorted(set(subscribe))}


def _store_api() -> list[str]:
    """JetStream requests of the state store: it creates and purges the streams, and reads chunks' headers."""
    requests = [
        f"{API}.STREAM.{verb}.{stream}"
        for verb in ("INFO", "CREATE", "UPDATE", "PURGE")
        for stream in STREAMS
    ]
    # The account's limits tell how much storage the streams may reserve.
    requests.append(f"{API}.INFO")
    requests += [f"{API}.CONSUMER.{verb}.{CHUNKS}.*" for verb in ("CREATE", "INFO", "MSG.NEXT")]
    return requests + _reading_api(STORE)


def _reading_api(service: str) -> list[str]:
    """JetStream requests of a service that reads stored messages.

    The body of a request names the subject to read. Permissions do not cover the body, so a reader of a log
    may read the log's whole stream.
    """
    requests: list[str] = []
    for log in LOGS:
        if service not in log.history_readers:
            continue
        requests.append(f"{API}.DIRECT.GET.{log.stream}")
        if service in log.readers:
            # Followers use it to notice that a stream was deleted and created again.
            requests.append(f"{API}.STREAM.INFO.{log.stream}")
    return requests


def flows(identities: Iterable[str] = ()) -> list[Flow]:
    """Return everything that passes between accounts, except answers to requests.

    `identities` are those of workers with their own accounts.
    """
    own = [worker_user(identity) for identity in identities]

    def users(services: Iterable[str]) -> list[str]:
        return [user for name in services for user in (name, *(own if name == WORKER else ()))]

    found: set[Flow] = set()
    for topic in TOPICS:
        if topic.internal:
            # It stays in the service's account. From there to the admin's and back, it would pass in a
            # circle, and the broker would not start.
            continue
        # The admin's account sends and receives everything.
        senders, readers = [*users(topic.senders), ADMIN], [*users(topic.readers), ADMIN]
        found |= {_passing(topic, sender, reader) for sender in senders for reader in readers}
    for log in LOGS:
        found |= {
            Flow(log.of_identity(Caller.from_token(writer).id), account_of(writer), HUB, "service")
            for writer in users(log.writers)
        }
        found |= {Flow(log.live("*"), HUB, account_of(reader), "stream") for reader in users(log.readers)}
    for endpoint in ENDPOINTS:
        found |= {
            Flow(endpoint.request_subject(caller), account_of(caller), account_of(endpoint.server), "service")
            for caller in (*users(endpoint.callers), ADMIN)
        }
    for user in users(SERVICES):
        requests = _reading_api(Caller.from_token(user).role)
        found |= {Flow(request, account_of(user), HUB, "service") for request in requests}
    within = (flow for flow in found if flow.source != flow.target)
    return sorted(within, key=lambda flow: (flow.kind, flow.subject, flow.source, flow.target))


def _passing(topic: Topic[Any], sender: str, reader: str) -> Flow:
    """Return a topic's flow from `sender` to `reader`. A worker's flow is limited to its own identity."""
    [*found] = {user.id for user in map(Caller.from_token, (sender, reader)) if user.id is not None}
    subject = topic.of_identity(found[0] if found else None)
    return Flow(subject, account_of(sender), account_of(reader), "stream")


def accounts(passwords: Mapping[str, str]) -> str:
    """Return the entries of the `accounts` block of the broker's configuration.

    `passwords` maps a user to its password as the file has it, such as `"secret"` in quotes or `$VARIABLE`.
    Users are services, `worker.IDENTITY`, and `admin`, which has no limits.
    """
    own = [user for user in passwords if "." in user]
    passing = flows(Caller.from_token(user).id or "" for user in own)
    exports: dict[str, list[Flow]] = {}
    imports: dict[str, list[Flow]] = {}
    for flow in passing:
        exporter, importer = _ends(flow)
        exports.setdefault(exporter, []).append(flow)
        imports.setdefault(importer, []).append(flow)
    return "".join(
        _account(name, passwords, exports.get(name, ()), imports.get(name, ()))
        for name in map(account_of, (*SERVICES, *own))
    )


def _account(
    name: str, passwords: Mapping[str, str], exports: Sequence[Flow], imports: Sequence[Flow]
) -> str:
    lines = [f"  {name} {{"]
    if name == HUB:
        lines.append("    jetstream: enabled")
    lines.append("    users: [")
    for user, password in passwords.items():
        if account_of(user) == name:
            lines += _user(user, password)
    lines.append("    ]")
    lines += _list("exports", _exports(name, exports))
    lines += _list("imports", _imports(name, imports))
    return "\n".join([*lines, "  }", ""])


def _user(user: str, password: str) -> Iterator[str]:
    yield f"      {{user: {json.dumps(user)}, password: {password}"
    if user != ADMIN:
        yield "        permissions: {"
        for verb, subjects in permissions(user).items():
            yield f"          {verb}: {{allow: ["
            yield from (f"            {json.dumps(subject)}" for subject in subjects)
            yield "          ]}"
        yield "        }"
    yield "      }"


def _exports(account: str, passing: Iterable[Flow]) -> Iterator[str]:
    if account == HUB:
        yield f"{{service: {json.dumps(NO_API)}}}"
    importers: dict[tuple[str, str], list[str]] = {}
    for flow in passing:
        importers.setdefault((flow.kind, flow.subject), []).append(_ends(flow)[1])
    for (kind, subject), allowed in sorted(importers.items()):
        several = f', response: stream, threshold: "{BATCH_TIMEOUT_S}s"' if subject == BATCHED else ""
        yield f"{{{kind}: {json.dumps(subject)}, accounts: [{', '.join(sorted(allowed))}]{several}}}"


def _imports(account: str, passing: Iterable[Flow]) -> Iterator[str]:
    if account != HUB:
        source = f"{{account: {HUB}, subject: {json.dumps(NO_API)}}}"
        yield f'{{service: {source}, to: "{API}.INFO"}}'
    for flow in passing:
        yield f"{{{flow.kind}: {{account: {_ends(flow)[0]}, subject: {json.dumps(flow.subject)}}}}}"


def _ends(flow: Flow) -> tuple[str, str]:
    """Return the exporting and the importing account of a flow."""
    return (flow.target, flow.source) if flow.kind == "service" else (flow.source, flow.target)


def _list(name: str, entries: Iterable[str]) -> list[str]:
    found = [f"      {entry}" for entry in entries]
    return [f"    {name}: [", *found, "    ]"] if found else []
