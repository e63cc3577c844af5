"""Installs the model of docs/how-to/model-plugin.md, as `pip install` would, from the page's own text."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "model-plugin.md"
NAME = "minimal"
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(language: str) -> list[str]:
    """The page's code blocks of one language, in their order."""
    return [text for kind, text in _BLOCK.findall(PAGE.read_text()) if kind == language]


def install(folder: Path) -> None:
    """Write the module and its metadata into `folder`, which is or will be on the import path."""
    module, _ = blocks("python")
    [project] = [tomllib.loads(text) for text in blocks("toml")]
    name, version = project["project"]["name"], project["project"]["version"]
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (folder / "minimal_model.py").write_text(module)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["project"]["entry-points"]
    (metadata / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "\n".join(f"{entry} = {value}" for entry, value in entries.items())
            for group, entries in groups.items()
        )
    )
