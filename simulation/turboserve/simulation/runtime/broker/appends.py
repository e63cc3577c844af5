"""Appends whose acknowledgement is the result of a call, on a network on which messages take no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from turboserve.simulation.runtime.broker.jetstream import API, JetStream, Storage
from turboserve.simulation.runtime.broker.link import Link
from turboserve.simulation.runtime.broker.messages import INBOX_PREFIX, Kind, Message
from turboserve.simulation.runtime.broker.network import Network
from turboserve.simulation.runtime.broker.stream import Appended

# Python 3.11 takes ten times as long for a member of an enumeration as for a global name.
_REQUEST, _STORES = Kind.REQUEST, Storage.STORES


class AppendingBroker(Protocol):
    """The broker as a client appends to it."""

    network: Network
    undisturbed: bool
    jetstream: JetStream
    on_message: Callable[[str, bytes], None] | None

    def route(self, subject: str, message: Message, kind: Kind) -> bool:
        """Deliver to the subscribers of `subject`."""


def append(broker: AppendingBroker, link: Link, message: Message) -> tuple[str, Appended] | None:
    """Publish a message to a stream, for a client that gets the acknowledgement as the result.

    Returns the stream and what it has stored. None: nothing has happened, and the client must send a request.
    Raises ApiError if the stream refuses the message.
    """
    if not (broker.network.at_once and broker.undisturbed and link.open_at_broker and link.open_at_client):
        return None
    subject, jetstream = message.subject, broker.jetstream
    name = jetstream.capturing(subject)
    if name is None or jetstream.storage is not _STORES or subject.startswith((API, INBOX_PREFIX)):
        return None
    if broker.on_message is not None:
        broker.on_message(subject, message.data)
    broker.route(subject, message, _REQUEST)
    stream = jetstream.streams[name]
    appended = jetstream.store(stream, message)
    if appended.stored is not None:
        jetstream.deliver(stream, appended.stored)
    return name, appended
