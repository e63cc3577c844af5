"""The broker's accounts and permissions, from the table of subjects.

Permissions do not limit reply subjects. The broker sends an answer of JetStream, whose body the asker chose,
to the subject of a request or of a stream if the request names that. So each service has an account of its
own, and what passes between two accounts is listed here. The subjects of one account do not exist in another,
and an answer goes back into the asker's account.

The state store's account is the hub: it has the streams. Within an account, permissions say the same again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from turboserve.subjects import ADMIN, CHUNKS, ENDPOINTS, EVENTS, LOGS, SERVICES, TOPICS, inbox_prefix

STORE = "state-store"
HUB = "STATE_STORE"
"""The state store's account, with the streams and the admin."""
API = "$JS.API"
REPLIES = "_R_.>"
"""Where a server answers requests from other accounts. The broker chooses the subject, not the asker."""

STREAMS = (CHUNKS, EVENTS)
BATCHED = f"{API}.DIRECT.GET.{EVENTS}"
"""The one request that is answered with several messages."""
BATCH_TIMEOUT_S = 10
"""Silence after which the broker takes such an answer to be complete."""


NO_API = "none.jetstream"
"""Subject without a server. The broker gives every account a JetStream API of its own, unless the account
imports `$JS.API.INFO` from elsewhere: so that is imported from here."""


@dataclass(frozen=True)
class Flow:
    """A subject that passes from one account to another."""

    subject: str
    source: str
    """Account in which it is published."""
    target: str
    """Account in which it is received."""
    kind: Literal["service", "stream"]
    """In NATS's terms: a service is imported by the source and may be answered; a stream is imported by the
    target."""


def account_of(user: str) -> str:
    """The account of a broker user: a service's own; the admin is in the state store's."""
    return (STORE if user == ADMIN else user).upper().replace("-", "_")


def permissions(service: str) -> dict[str, list[str]]:
    """What the broker lets `service` publish and subscribe to. Raises ValueError for an unknown service."""
    if service not in SERVICES:
        raise ValueError(f"service: {service!r} is not one of {', '.join(SERVICES)}")
    publish = [e.request_subject(service) for e in ENDPOINTS if service in e.callers]
    publish += [topic.every for topic in TOPICS if service in topic.senders]
    publish += [log.every for log in LOGS if service in log.writers]
    publish += _store_api() if service == STORE else _reading_api(service)
    subscribe = [f"{inbox_prefix(service)}.>"]
    subscribe += [topic.every for topic in TOPICS if service in topic.readers]
    subscribe += [log.live("*") for log in LOGS if service in log.readers]
    served = [e.every for e in ENDPOINTS if service == e.server]
    if served:
        subscribe += served
        publish.append(REPLIES)
    if service == STORE:
        # The admin is in this account, so its requests are not renamed on their way.
        publish.append(f"{inbox_prefix(ADMIN)}.>")
    return {"publish": sorted(set(publish)), "subscribe": sorted(set(subscribe))}


def _store_api() -> list[str]:
    """What the state store asks of JetStream: it makes and purges the streams, and reads chunks' headers."""
    requests = [
        f"{API}.STREAM.{verb}.{stream}"
        for verb in ("INFO", "CREATE", "UPDATE", "PURGE")
        for stream in STREAMS
    ]
    # The account's limit is the storage that streams may reserve.
    requests.append(f"{API}.INFO")
    requests += [f"{API}.CONSUMER.{verb}.{CHUNKS}.*" for verb in ("CREATE", "INFO", "MSG.NEXT")]
    return requests + _reading_api(STORE)


def _reading_api(service: str) -> list[str]:
    """What a reader of stored messages asks of JetStream.

    Permissions can only name the subject of a request for the newest message. Whoever reads on from a
    sequence may read the whole stream.
    """
    requests: list[str] = []
    for log in LOGS:
        if service not in log.history_readers:
            continue
        requests += [f"{API}.DIRECT.GET.{log.stream}", f"{API}.DIRECT.GET.{log.stream}.{log.every}"]
        if service in log.readers:
            # Followers notice by it that a stream was made anew.
            requests.append(f"{API}.STREAM.INFO.{log.stream}")
    return requests


def flows() -> list[Flow]:
    """Everything that passes between accounts. Beside it nothing does, but answers to services."""
    found: set[Flow] = set()
    for topic in TOPICS:
        # The admin's account sends and hears everything.
        sources = {account_of(sender) for sender in topic.senders} | {HUB}
        targets = {account_of(reader) for reader in topic.readers} | {HUB}
        found |= {Flow(topic.every, source, target, "stream") for source in sources for target in targets}
    for log in LOGS:
        found |= {Flow(log.every, account_of(writer), HUB, "service") for writer in log.writers}
        found |= {Flow(log.live("*"), HUB, account_of(reader), "stream") for reader in log.readers}
    for endpoint in ENDPOINTS:
        found |= {
            Flow(endpoint.request_subject(caller), account_of(caller), account_of(endpoint.server), "service")
            for caller in (*endpoint.callers, ADMIN)
        }
    for service in SERVICES:
        found |= {Flow(request, account_of(service), HUB, "service") for request in _reading_api(service)}
    within = (flow for flow in found if flow.source != flow.target)
    return sorted(within, key=lambda flow: (flow.kind, flow.subject, flow.source, flow.target))


def accounts(passwords: Mapping[str, str]) -> str:
    """The entries of the configuration's `accounts` block.

    `passwords`: user → its password as it stands in the file, such as `"secret"` in quotes or `$VARIABLE`.
    Users are services, and `admin`, whom no permission limits.
    """
    return "".join(_account(account_of(service), passwords) for service in SERVICES)


def _account(name: str, passwords: Mapping[str, str]) -> str:
    lines = [f"  {name} {{"]
    if name == HUB:
        lines.append("    jetstream: enabled")
    lines.append("    users: [")
    for user, password in passwords.items():
        if account_of(user) == name:
            lines += _user(user, password)
    lines.append("    ]")
    lines += _list("exports", _exports(name))
    lines += _list("imports", _imports(name))
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


def _exports(account: str) -> Iterator[str]:
    if account == HUB:
        yield f"{{service: {json.dumps(NO_API)}}}"
    importers: dict[tuple[str, str], list[str]] = {}
    for flow in flows():
        exporter, importer = _ends(flow)
        if exporter == account:
            importers.setdefault((flow.kind, flow.subject), []).append(importer)
    for (kind, subject), allowed in sorted(importers.items()):
        several = f', response: stream, threshold: "{BATCH_TIMEOUT_S}s"' if subject == BATCHED else ""
        yield f"{{{kind}: {json.dumps(subject)}, accounts: [{', '.join(sorted(allowed))}]{several}}}"


def _imports(account: str) -> Iterator[str]:
    if account != HUB:
        source = f"{{account: {HUB}, subject: {json.dumps(NO_API)}}}"
        yield f'{{service: {source}, to: "{API}.INFO"}}'
    for flow in flows():
        exporter, importer = _ends(flow)
        if importer == account:
            yield f"{{{flow.kind}: {{account: {exporter}, subject: {json.dumps(flow.subject)}}}}}"


def _ends(flow: Flow) -> tuple[str, str]:
    """The exporting and the importing account."""
    return (flow.target, flow.source) if flow.kind == "service" else (flow.source, flow.target)


def _list(name: str, entries: Iterable[str]) -> list[str]:
    found = [f"      {entry}" for entry in entries]
    return [f"    {name}: [", *found, "    ]"] if found else []
