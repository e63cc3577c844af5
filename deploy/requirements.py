"""Print the requirements of distributions, so that images install them in a layer of their own.

    requirements.py [--without NAME]… [--extra NAME]… FOLDER…

TurboServe's own distributions are left out: they change with every edit, their requirements seldom.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

OWN = "turboserve-"


def third_party(
    folders: Iterable[Path], without: Iterable[str] = (), extras: Iterable[str] = ()
) -> list[str]:
    """Return the requirements in the `pyproject.toml` of each folder, sorted, each once.

    `extras` names optional dependencies that are added where a folder has them.
    """
    left_out = set(without)
    found: set[str] = set()
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        optional = project.get("optional-dependencies", {})
        listed = [
            *project.get("dependencies", []),
            *(item for name in extras for item in optional.get(name, [])),
        ]
        for requirement in listed:
            name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
            if not name.startswith(OWN) and name not in left_out:
                found.add(requirement)
    return sorted(found)


def main(arguments: Sequence[str]) -> None:
    folders: list[Path] = []
    without: list[str] = []
    extras: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--without":
            without.append(next(words))
        elif word == "--extra":
            extras.append(next(words))
        else:
            folders.append(Path(word))
    print("\n".join(third_party(folders, without, extras)))


if __name__ == "__main__":
    main(sys.argv[1:])
