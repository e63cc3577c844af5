"""Request the health of the broker in this container, and append a message. The watchdog runs it.

Exits with 0 if the message is stored, 1 if the broker answers that it cannot store, 2 if it does not answer,
3 if it is full by its own limits. It implements the client protocol with the core of the standard library
only: it starts every two seconds, and the import of a client would cost ten times as much.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

ADDRESS = ("127.0.0.1", int(os.environ.get("NATS_PORT", "4222")))
ANSWER_S = 2.0
HEALTH = "$SYS.REQ.SERVER.PING.HEALTHZ"
MEMBER = os.environ.get("NATS_SERVER_NAME")
"""The server's name in a cluster. Empty: it is alone.

A server of a cluster is judged by itself: its own JetStream, and a stream that only this server has."""
SUBJECT = f"watchdog.probe.{MEMBER}" if MEMBER else "watchdog.probe"
STREAM = f"WATCHDOG-{MEMBER}" if MEMBER else "WATCHDOG"
CREATE = f"$JS.API.STREAM.CREATE.{STREAM}"
HEALTH_OPTIONS = {"server_name": MEMBER, "js-enabled-only": True} if MEMBER else {}
CONFIG = {
    "name": STREAM,
    "subjects": [SUBJECT],
    "storage": "file",
    "retention": "limits",
    "discard": "old",
    "max_msgs": 1,
    "num_replicas": 1,
    **({"placement": {"tags": [MEMBER]}} if MEMBER else {}),
}
WRITTEN, FAILS, SILENT, FULL = 0, 1, 2, 3


class Connection:
    """One user's connection."""

    def __init__(self, user: str) -> None:
        self._socket = socket.create_connection(ADDRESS, ANSWER_S)
        self._file = self._socket.makefile("rwb")
        self._inbox = f"_INBOX_{user}.{os.getpid()}"
        self._file.readline()  # INFO
        password = os.environ[f"NATS_{user.upper()}_PASSWORD"]
        options = {"user": user, "pass": password, "verbose": False, "headers": True, "no_responders": True}
        self._send(f"CONNECT {json.dumps(options)}\r\nSUB {self._inbox} 1\r\n")

    def request(self, subject: str, body: object = None) -> dict | None:
        """Return the answer; None if there is no responder.

        Raises OSError without an answer or on an error.
        """
        data = "" if body is None else json.dumps(body)
        self._send(f"PUB {subject} {self._inbox} {len(data)}\r\n{data}\r\n")
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            # The broker's pings alone are no answer.
            if time.monotonic() > deadline_s:
                raise OSError(f"no answer to {subject}")
            words = self._file.readline().decode().split()
            if not words:
                raise OSError("the broker closed the connection")
            if words[0] == "PING":
                self._send("PONG\r\n")
            elif words[0] == "-ERR":
                raise OSError(" ".join(words))
            elif words[0] in ("MSG", "HMSG"):
                payload = self._file.read(int(words[-1]) + 2)
                return json.loads(payload) if words[0] == "MSG" else None

    def _send(self, text: str) -> None:
        self._file.write(text.encode())
        self._file.flush()


def created(broker: Connection) -> dict | None:
    """Create the stream, and return the answer.

    Returns None if a cluster does not create it: its leader may be away, which is not this server's fault.
    """
    try:
        answer = broker.request(CREATE, CONFIG) or {}
    except OSError:
        if MEMBER:
            return None
        raise
    return None if MEMBER and "error" in answer else answer


def main() -> int:
    try:
        health = Connection("health").request(HEALTH, HEALTH_OPTIONS) or {}
        if health.get("data", {}).get("status") != "ok":
            print(f"unhealthy: {health}", file=sys.stderr)
            return FAILS
        broker = Connection("watchdog")
    except OSError as error:
        print(f"no answer: {error}", file=sys.stderr)
        return SILENT
    try:
        answer = broker.request(SUBJECT)
        if answer is None:
            made = created(broker)
            answer = made if made is None or "error" in made else broker.request(SUBJECT) or {}
    except OSError as error:
        print(f"not stored: {error}", file=sys.stderr)
        return FAILS
    if answer is None:
        return WRITTEN
    if "error" in answer:
        print(f"refused: {answer['error']}", file=sys.stderr)
        return FULL
    return WRITTEN


if __name__ == "__main__":
    sys.exit(main())
