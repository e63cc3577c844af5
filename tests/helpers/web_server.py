"""A web server of another origin than the gateway's, for pages that use the API from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        return None


class WebServer:
    """Serves the files of `folder` at `url`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"

    def page(self, name: str, text: str) -> str:
        """Put a page into the folder. Returns its address."""
        (self.folder / name).write_text(text)
        return f"{self.url}/{name}"


@contextmanager
def serving(folder: Path) -> Iterator[WebServer]:
    """Serve `folder` on a free port of the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield WebServer(folder, server.server_port)
    finally:
        server.shutdown()
        server.server_close()
