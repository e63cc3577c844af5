"""A stand-in for a worker: answers /readyz and ends on SIGTERM, unless it ignores it. Needs no packages."""

import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

mode = sys.argv[1] if len(sys.argv) > 1 else "good"
if mode == "crash":
    sys.exit(3)


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if mode != "never" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", int(os.environ["TURBOSERVE_HEALTH_PORT"])), Health)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
