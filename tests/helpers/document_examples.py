"""The commands and scripts that documents show. `NOT_RUN` lists those that no test runs as shown.

All others run, in the order of their document: `tests.helpers.example_runner` does what a reader does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = tuple(
    str(path.relative_to(ROOT))
    for path in (
        ROOT / "README.md",
        ROOT / "docs" / "quickstart.md",
        *sorted((ROOT / "docs" / "how-to").glob("*.md")),
        ROOT / "sdk" / "python" / "README.md",
        ROOT / "sdk" / "js" / "README.md",
    )
)
ON_THE_STACK = (
    "docs/quickstart.md",
    "docs/how-to/python-client.md",
    "docs/how-to/recordings.md",
    "docs/how-to/share-a-session.md",
    "docs/how-to/traces.md",
    "docs/how-to/typed-controls.md",
    "docs/how-to/webhooks.md",
)
"""Documents whose examples tests/stack/test_stack_documents.py runs."""
WITH_KEYS = ("docs/how-to/api-keys.md", "docs/how-to/audit-log.md")
"""Documents whose examples tests/stack/test_stack_keys.py runs, on a stack with keys."""

STARTS = "starts a stack of its own, as the fixtures of tests/stack/conftest.py do"
SETTING = "a setting of a stack that is started next"
MINUTES = "takes minutes"
INSTALLS = "installs packages"
CONTAINERS = "needs Docker: tests/deploy/test_deploy_files.py checks the files"
CLUSTER = "needs Kubernetes: tests/deploy/test_kubernetes_manifests.py checks the manifests"
IN_THE_BROWSER = "tests/browser/test_javascript_client.py runs it in Chromium"
MODEL = "tests/stack/test_stack_model_plugin.py installs and serves it"

NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {"make up": INSTALLS, "make test": "is this suite"},
    "docs/quickstart.md": {
        "make up": INSTALLS,
        ".venv/bin/turboserve bench stream": "takes minutes: tests/stack/test_stack_end_to_end.py is shorter",
    },
    "docs/how-to/api-keys.md": {"turboserve up": "tests/stack/test_stack_keys.py starts the stack"},
    "docs/how-to/fidelity.md": {"export": SETTING, "turboserve profile fidelity": MINUTES},
    "docs/how-to/host-sessions.md": {"TURBOSERVE_HOST_SESSIONS=4 turboserve up": STARTS},
    "docs/how-to/javascript-client.md": {
        "npm install": "tests/sdk/test_sdk_javascript.py packs and imports the client",
        "TURBOSERVE_CORS_ORIGINS": STARTS,
        "<!doctype html>": IN_THE_BROWSER,
        "python3 -m http.server": IN_THE_BROWSER,
        "import {": IN_THE_BROWSER,
    },
    "docs/how-to/kubernetes.md": {
        "kubectl": CLUSTER,
        ".venv/bin/python deploy/kubernetes/generate.py": CLUSTER,
    },
    "docs/how-to/low-latency.md": {
        "const pc = new RTCPeerConnection()": "tests/gateway/test_gateway_whep_example.py runs it",
        "turboserve up": STARTS,
        "turboserve bench key-press": "tests/browser/test_key_press_benchmark.py runs it in Chromium",
        "export": SETTING,
    },
    "docs/how-to/model-plugin.md": {
        "": MODEL,
    },
    "docs/how-to/monitor.md": {"make compose-env": CONTAINERS, "docker compose": CONTAINERS},
    "docs/how-to/public-models.md": {"TURBOSERVE_MODEL=": SETTING},
    "docs/how-to/python-client.md": {"pip install": INSTALLS},
    "docs/how-to/redundancy.md": {
        "turboserve up": STARTS,
        "docker compose": CONTAINERS,
        "turboserve bench": MINUTES,
    },
    "docs/how-to/run.md": {"turboserve up": STARTS, "docker compose": CONTAINERS},
    "docs/how-to/scale-the-pool.md": {
        "curl -X": "starts and ends workers: tests/gateway/test_gateway_pools.py sends these orders",
        "turboserve profile autoscaler": MINUTES,
        "TURBOSERVE_PROVIDER=ray": SETTING,
    },
    "docs/how-to/share-a-session.md": {
        "export": SETTING,
        "<iframe": "tests/security/access/test_security_browser.py frames a session in Chromium",
    },
    "docs/how-to/test-faults.md": {"turboserve bench chaos": MINUTES},
    "docs/how-to/webhooks.md": {
        "import base64": "tests/webhooks/test_webhooks_delivery.py runs the receiver",
    },
    "sdk/python/README.md": {
        "pip install": INSTALLS,
        "from turboserve.client import Client": "docs/how-to/python-client.md has the same example",
    },
    "sdk/js/README.md": {
        "npm install": "tests/sdk/test_sdk_javascript.py packs and imports the client",
        "import {": IN_THE_BROWSER,
        "import type {": "tests/sdk/test_sdk_typescript.py compiles it",
    },
}
"""Document → how an example begins → why `ExampleRunner` does not run it, and where a test does."""

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_DATA = frozenset({"json", "yaml", "toml", "mermaid"})
"""Kinds of blocks that nobody runs."""


@dataclass(frozen=True)
class Example:
    """One command, or one block of code."""

    document: str
    kind: str
    """`console` for a command, or the language of the block."""
    text: str
    shown: tuple[str, ...] = ()
    """Lines of output that the document shows below the command."""

    def __str__(self) -> str:
        return f"{self.document}: {self.text.splitlines()[0][:60]}"

    @property
    def reason_not_run(self) -> str | None:
        """Why the example does not run as shown. None: it runs."""
        reasons = NOT_RUN.get(self.document, {})
        return next((reason for start, reason in reasons.items() if self.text.startswith(start)), None)


def examples(document: str) -> list[Example]:
    """Return the examples of a document, in their order."""
    found: list[Example] = []
    for indent, kind, text in _BLOCK.findall((ROOT / document).read_text()):
        block = re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        if kind == "console":
            found += _commands(document, block)
        elif kind == "sh":
            lines = block.replace("\\\n", " ").splitlines()
            found += [Example(document, "console", line) for line in lines]
        elif kind not in _DATA:
            found.append(Example(document, kind, block))
    return found


def _commands(document: str, block: str) -> list[Example]:
    """Return the commands of a block, each with the output below it."""
    found: list[tuple[str, list[str]]] = []
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif found:
            found[-1][1].append(line)
    return [Example(document, "console", text, tuple(shown)) for text, shown in found]
