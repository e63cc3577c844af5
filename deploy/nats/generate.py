"""Write the broker's configuration for containers: an account and a user per service.

    python deploy/nats/generate.py          write nats.conf and nats-cluster.conf beside this file
    python deploy/nats/generate.py --check  fail if a file is out of date
    python deploy/nats/generate.py --workers wk0 wk1
                                            print one with an identity for each of these workers
    python deploy/nats/generate.py --cluster-workers wk0 wk1
                                            the same for a server of a cluster

Passwords are not in the file: nats-server reads them from its environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from turboserve.broker_accounts import WORKER, account_of, accounts, worker_user
from turboserve.subjects import SERVICES

FILE = Path(__file__).with_name("nats.conf")
CLUSTER_FILE = Path(__file__).with_name("nats-cluster.conf")
SERVERS = ("nats", "nats-2", "nats-3")
"""Host names of a cluster's servers."""
ROUTE_PORT = 6222

ALONE = """\
server_name: "turboserve"
"""
MEMBER = f"""\
server_name: $NATS_SERVER_NAME
# The watchdog places a stream on its own server by this.
server_tags: [$NATS_SERVER_NAME]
# A frozen client answers no ping, and gets no more requests.
ping_interval: "500ms"
ping_max: 2
cluster {{
  name: "turboserve"
  port: {ROUTE_PORT}
  authorization {{user: "route", password: $NATS_ROUTE_PASSWORD}}
  # Each with user and password: nats-route://route:PASSWORD@HOST:{ROUTE_PORT}
  routes: [{", ".join(f"$NATS_ROUTE_{number}" for number in range(1, len(SERVERS) + 1))}]
  ping_interval: "500ms"
  ping_max: 2
}}
"""
SYNC = """\
  # An acknowledged append is on disk, so the loss of one server's power loses none.
  sync_interval: always
"""
INTRODUCTION = """\
# Made by deploy/nats/generate.py from turboserve.subjects: change that table, then run it again.
# A value that starts with $ comes from the environment of nats-server.
"""
HEAD = """\
port: 4222
# A chunk at 720p is well below this; latents travel raw.
max_payload: 8388608
jetstream {
  store_dir: "/data"
  # At most half of the volume: a log of which parts were removed takes up to twice its size for a while.
  max_file_store: $NATS_MAX_FILE_STORE
}
# No HTTP monitor, which asks for no password: health is asked in the system account, by a user who may ask
# $SYS.REQ.SERVER.PING.HEALTHZ and nothing else.
system_account: SYS
accounts {
  SYS {
    users: [
      {
        user: "health"
        password: $NATS_HEALTH_PASSWORD
        permissions: {
          publish: {allow: ["$SYS.REQ.SERVER.PING.HEALTHZ"]}
          subscribe: {allow: ["_INBOX_health.>"]}
        }
      }
    ]
  }
"""
# The watchdog appends to a stream of its own, which it may create and not read. It also has its own account:
# a user that may create a stream can make the broker publish any message on any subject of the account.
WATCHDOG = """\
  WATCHDOG {
    jetstream: enabled
    users: [
      {
        user: "watchdog"
        password: $NATS_WATCHDOG_PASSWORD
        permissions: {
          publish: {allow: ["$JS.API.STREAM.CREATE.STREAM_NAME", "watchdog.probeSUFFIX"]}
          subscribe: {allow: ["_INBOX_watchdog.>"]}
        }
      }
    ]
  }
"""


def password_variable(user: str) -> str:
    """Return the environment variable that holds the password of this broker user."""
    return f"NATS_{account_of(user)}_PASSWORD"


def config(workers: Sequence[str] = (), *, cluster: bool = False) -> str:
    """Return the configuration file's text. Strings are quoted as JSON, which NATS also reads.

    With `cluster`, it is for each of `SERVERS`, by the environment variable NATS_SERVER_NAME.

    `workers` are identities; if there are any, there is no common user for all workers. Raises ValueError for
    an invalid identity.
    """
    services = [name for name in SERVICES if not workers or name != WORKER]
    users = {user: f"${password_variable(user)}" for user in (*services, *map(worker_user, workers))}
    head = INTRODUCTION + (MEMBER if cluster else ALONE) + HEAD
    watchdog = WATCHDOG.replace("STREAM_NAME", "*" if cluster else "WATCHDOG")
    watchdog = watchdog.replace("SUFFIX", ".*" if cluster else "")
    if cluster:
        head = head.replace("  max_file_store:", f"{SYNC}  max_file_store:")
    return f"{head}{watchdog}{accounts(users)}}}\n"


def main() -> int:
    if sys.argv[1:2] in (["--workers"], ["--cluster-workers"]):
        print(config(sys.argv[2:], cluster=sys.argv[1] == "--cluster-workers"), end="")
        return 0
    texts = {FILE: config(), CLUSTER_FILE: config(cluster=True)}
    if sys.argv[1:] == ["--check"]:
        stale = [file for file, text in texts.items() if not file.exists() or file.read_text() != text]
        for file in stale:
            print(f"{file} is out of date: run python {Path(__file__).name}", file=sys.stderr)
        return int(bool(stale))
    for file, text in texts.items():
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
