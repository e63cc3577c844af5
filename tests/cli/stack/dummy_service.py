"""A stand-in for every service, for tests of the supervisor: ready at once, ends on SIGTERM.

As `autoscaler` it starts workers, as the real one does. As `worker` it only runs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from turboserve import lifeline


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


def say(event: str, service: str) -> None:
    print(json.dumps({"service": service, "event": event, "level": "info"}), flush=True)


def start_worker(number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"TURBOSERVE_WORKER_ID": str(number), "TURBOSERVE_HEALTH_PORT": str(port)}
    command = [sys.executable, __file__, "turboserve.worker"]
    subprocess.Popen(command, env={**os.environ, **environment}, pass_fds=lifeline.pass_fds())


def main() -> None:
    lifeline.watch()
    service = "worker" if "turboserve.worker" in sys.argv else os.environ["TURBOSERVE_NATS_USER"]
    if os.environ.get("DUMMY_FAILS") == service:
        sys.exit(3)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if service == "autoscaler":
        for number in range(int(os.environ["TURBOSERVE_POOL_SIZE"])):
            start_worker(number)
    server = HTTPServer(("127.0.0.1", int(os.environ["TURBOSERVE_HEALTH_PORT"])), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say("service lives", service)
    signal.sigwait({signal.SIGTERM})
    say("service stops", service)


if __name__ == "__main__":
    main()
