"""The JavaScript client's TypeScript: what is committed in `dist` is what the compiler makes of `src`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SDK = ROOT / "sdk" / "js"
COMPILER = SDK / "node_modules" / "typescript" / "bin" / "tsc"
needs_compiler = pytest.mark.skipif(
    shutil.which("node") is None or not COMPILER.is_file(),
    reason="no TypeScript compiler (make setup-js): nothing was compiled",
)
EXAMPLES = re.findall(r"```(?:js|ts)\n(.*?)```", (SDK / "README.md").read_text(), re.DOTALL)
REFUSED = """
import { Client } from "turboserve-client";
import type { PlayerEventDetails } from "turboserve-client/player";

const client = new Client("http://127.0.0.1:8080", { key: "secret" });
// @ts-expect-error: a prompt is a text.
const session = await client.create(7);
// @ts-expect-error: a session that was not read yet has no description.
session.info.phase;
// @ts-expect-error: there is no such event.
type Detail = PlayerEventDetails["shown"];
// @ts-expect-error: the package's own.
client.gateways;
"""
"""Each line after a comment is an error, and the compiler fails if it is not."""
STRICT = {
    "target": "ESNext",
    "module": "NodeNext",
    "lib": ["ESNext", "DOM", "DOM.Iterable", "DOM.AsyncIterable"],
    "types": [],
    "strict": True,
    "skipLibCheck": False,
    "noEmit": True,
}


def compiled(*arguments: str) -> None:
    done = subprocess.run(
        ["node", str(COMPILER), *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def files(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


@needs_compiler
def test_the_modules_are_what_the_compiler_makes_of_the_source(tmp_path: Path) -> None:
    compiled("--project", str(SDK), "--outDir", str(tmp_path))
    # `make sdk-js` writes them.
    assert files(SDK / "dist") == files(tmp_path)


@needs_compiler
def test_the_readmes_examples_compile_against_the_package(tmp_path: Path) -> None:
    assert len(EXAMPLES) == 2
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "turboserve-client").symlink_to(SDK)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "tsconfig.json").write_text(json.dumps({"compilerOptions": STRICT}))
    for number, text in enumerate((*EXAMPLES, REFUSED)):
        (tmp_path / f"example{number}.ts").write_text(text)
    compiled("--project", str(tmp_path))


def test_the_compiler_is_pinned_and_comes_from_any_registry() -> None:
    package, lock = (json.loads((SDK / name).read_text()) for name in ("package.json", "package-lock.json"))
    locked = lock["packages"]
    assert package["devDependencies"] == {"typescript": locked["node_modules/typescript"]["version"]}
    assert package["devDependencies"] == locked[""]["devDependencies"]
    others = set(locked) - {"", "node_modules/typescript"}
    assert all(name.startswith("node_modules/@typescript/typescript-") for name in others)
    assert not any("resolved" in each for each in locked.values())
