"""A worker's transfer between addresses of one network namespace, as seen from another namespace.

It runs in a network namespace of its own (`unshare --net --mount`), and creates a second one, joined by two
networks: that of the transfer, and another. It prints one JSON object, with an entry for each named backend.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from tests.worker.transfer.transfer_peer import (
    KEY,
    MIGRATION,
    MODEL,
    SESSION,
    TARGET,
    Giver,
    Room,
    State,
    Steps,
)
from turboserve.worker.transfer.interface import confine_libraries, find_interface
from turboserve.worker.transfer.links import Links
from turboserve.worker.transfer.network import listen
from turboserve.worker.transfer.pace import CopyLimits
from turboserve.worker.transfer.source import Source
from turboserve.worker.transfer.target import Target

SIZE = 50_000
TRANSFER, OTHER = "10.77.1.1", "10.77.2.1"
PATIENCE_S = 60.0
PROBE = """
import json, socket, sys
answers = []
for host, port in json.loads(sys.argv[1]):
    with socket.socket() as one:
        one.settimeout(3.0)
        try:
            one.connect((host, port))
            answers.append([host, port, "connected"])
        except ConnectionRefusedError:
            answers.append([host, port, "refused"])
        except TimeoutError:
            answers.append([host, port, "nothing"])
print(json.dumps(answers))
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def join(stranger: int) -> None:
    """Create the two networks, each with this namespace at .1 and the stranger's at .2."""
    # UCX searches for interfaces there.
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    run("ip", "link", "set", "lo", "up")
    inside = ("nsenter", "--target", str(stranger), "--net")
    run(*inside, "ip", "link", "set", "lo", "up")
    for number, address in ((1, TRANSFER), (2, OTHER)):
        ours, theirs = f"ours{number}", f"theirs{number}"
        run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", str(stranger))
        run("ip", "addr", "add", f"{address}/24", "dev", ours)
        run("ip", "link", "set", ours, "up")
        run(*inside, "ip", "addr", "add", f"10.77.{number}.2/24", "dev", theirs)
        run(*inside, "ip", "link", "set", theirs, "up")
    # The kernel notices later that both ends are up. UCX skips interfaces that are not.
    deadline = time.monotonic() + PATIENCE_S
    while not all(psutil.net_if_stats()[name].isup for name in ("lo", "ours1", "ours2")):
        assert time.monotonic() < deadline, psutil.net_if_stats()
        time.sleep(0.01)


async def main(backend: str, stranger: int) -> dict[str, object]:
    interface = find_interface(f"{TRANSFER}/24".replace(".1.1/", ".1.0/"))
    confine_libraries(interface)
    links = [Links([backend], torch.device("cpu"), MODEL, interface) for _ in range(2)]
    giver = Giver(SIZE, Steps(None, None), quiesced=False)  # type: ignore[arg-type]
    server, port = await listen(Source(giver, links[0], CopyLimits()).serve, interface.address, 0)
    room = Room(SIZE)
    target = Target(TARGET, links[1], PATIENCE_S)
    await target.fetch(SESSION, MIGRATION, KEY, [f"tcp://{interface.address}:{port}"], room, PATIENCE_S)
    waiting = [one for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    found = sorted({(one.laddr.ip, one.laddr.port) for one in waiting})
    asked = [(host, number) for _, number in found for host in (TRANSFER, OTHER)]
    answers = await asyncio.to_thread(
        subprocess.run,
        ["nsenter", "--target", str(stranger), "--net", sys.executable, "-c", PROBE, json.dumps(asked)],
        capture_output=True,
        check=True,
    )
    server.close()
    for one in links:
        one.close()
    return {
        "fetched": room.holds(State(SIZE)),
        "transfer": TRANSFER,
        "other": OTHER,
        "port": port,
        "listeners": found,
        "answers": json.loads(answers.stdout),
    }


if __name__ == "__main__":
    with subprocess.Popen(["unshare", "--net", "sleep", "600"]) as beside:
        try:
            # Wait until it has left this namespace.
            while Path(f"/proc/{beside.pid}/comm").read_text().strip() != "sleep":
                time.sleep(0.01)
            join(beside.pid)
            seen = {backend: asyncio.run(main(backend, beside.pid)) for backend in sys.argv[1:]}
            print(json.dumps(seen))
        finally:
            beside.kill()
