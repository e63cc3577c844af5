"""Write the broker's configuration for containers: an account and a user per service.

    python deploy/nats/generate.py          write nats.conf beside this file
    python deploy/nats/generate.py --check  fail if the file is out of date
    python deploy/nats/generate.py --workers wk0 wk1
                                            print one with an identity for each of these workers

Passwords are not in the file: nats-server reads them from its environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from turboserve.broker_accounts import WORKER, account_of, accounts, worker_user
from turboserve.subjects import SERVICES

FILE = Path(__file__).with_name("nats.conf")

HEAD = """\
# Made by deploy/nats/generate.py from turboserve.subjects: change that table, then run it again.
# A value that starts with $ comes from the environment of nats-server.
server_name: "turboserve"
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
          publish: {allow: ["$JS.API.STREAM.CREATE.WATCHDOG", "watchdog.probe"]}
          subscribe: {allow: ["_INBOX_watchdog.>"]}
        }
      }
    ]
  }
"""


def password_variable(user: str) -> str:
    """Return the environment variable that holds the password of this broker user."""
    return f"NATS_{account_of(user)}_PASSWORD"


def config(workers: Sequence[str] = ()) -> str:
    """Return the configuration file's text. Strings are quoted as JSON, which NATS also reads.

    `workers` are identities; if there are any, there is no common user for all workers. Raises ValueError for
    an invalid identity.
    """
    services = [name for name in SERVICES if not workers or name != WORKER]
    users = {user: f"${password_variable(user)}" for user in (*services, *map(worker_user, workers))}
    return f"{HEAD}{WATCHDOG}{accounts(users)}}}\n"


def main() -> int:
    if sys.argv[1:2] == ["--workers"]:
        print(config(sys.argv[2:]), end="")
        return 0
    if sys.argv[1:] == ["--check"]:
        if FILE.exists() and FILE.read_text() == config():
            return 0
        print(f"{FILE} is out of date: run python {Path(__file__).name}", file=sys.stderr)
        return 1
    FILE.write_text(config())
    return 0


if __name__ == "__main__":
    sys.exit(main())
