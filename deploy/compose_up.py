"""Build the images, bring the stack up in containers, wait until it serves, and print how to use it.

`make compose-up` runs it, after compose_env.py has written `.env`. `make compose-down` takes it down.
"""

from __future__ import annotations

import asyncio
import os
import sys

from compose_env import ROOT, check, first_key
from compose_test import build, wait_ready
from containers import Engine, EngineError, prepare_network, run


def say(text: str) -> None:
    print(f"compose-up: {text}", flush=True)


def main(words: list[str]) -> int:
    os.chdir(ROOT)
    try:
        engine = Engine.find()
        found = check(ROOT / ".env", (ROOT / ".env.example").read_text())
        if words == ["down"]:
            run([*engine.compose, "down"], {})
            return 0
        build(engine, found.get("TURBOSERVE_TAG") or "dev")
        if (remark := prepare_network()) is not None:
            say(remark)
        run([*engine.compose, "up", "-d", "--no-build"], {}, quiet=True)
        bind, port = found.get("TURBOSERVE_BIND") or "127.0.0.1", found.get("TURBOSERVE_PORT") or "8080"
        host = "127.0.0.1" if bind in ("0.0.0.0", "::") else bind
        key = first_key(found)
        asyncio.run(wait_ready(f"http://{host}:{port}", key))
    except (EngineError, OSError, TimeoutError) as error:
        say(f"FAILED: {error}")
        return 1
    say(f"the stack is up: http://{host}:{port}/")
    reach = (
        "this machine"
        if host == bind and host.startswith("127.")
        else "every client that can connect to the port"
    )
    if key is None:
        say(f"no API keys: {reach} may do everything")
    else:
        say(f"reachable by {reach}; a key is needed, and stands in .env:")
        say(f"  page:  http://{host}:{port}/ asks for it: {key}")
        say(f"  curl:  curl -H 'Authorization: Bearer {key}' http://{host}:{port}/v1/sessions")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
