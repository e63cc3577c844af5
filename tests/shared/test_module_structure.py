"""Structure of the tree: no module is longer than a reader takes in, and no modules import each other."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.shared.test_names import DISTRIBUTIONS, ROOT, trees

LINES = 300
YET_TO_BE_SPLIT = {
    "sdk/python/turboserve/client/models.py",
    "services/worker/turboserve/worker/engine/pipeline.py",
    "simulation/turboserve/simulation/runtime/broker/client.py",
    "simulation/turboserve/simulation/runtime/broker/stream.py",
    "simulation/turboserve/simulation/runtime/loop.py",
    "simulation/turboserve/simulation/world.py",
}
OUTSIDE_DISTRIBUTIONS = ("bench/gpu", "deploy", "tools", "training")


def test_no_module_is_longer_than_a_reader_takes_in() -> None:
    folders = [*DISTRIBUTIONS.values(), *(ROOT / name for name in OUTSIDE_DISTRIBUTIONS)]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 500
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    longer = {path: count for path, count in lines.items() if count > LINES}
    assert {path: longer[path] for path in longer.keys() - YET_TO_BE_SPLIT} == {}


def module_name(path: Path) -> str:
    """Return the name under which the module of a distribution is imported."""
    parts = path.with_suffix("").parts
    named = parts[len(parts) - parts[::-1].index("turboserve") - 1 :]
    return ".".join(named[:-1] if named[-1] == "__init__" else named)


def imported(tree: ast.Module, modules: Collection[str]) -> set[str]:
    """Return those of `modules` that a module imports, also for types alone."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            # A package from which only its modules are imported need not be complete.
            found |= named if named <= set(modules) else {*named, node.module}
    return found & set(modules)


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return modules of which each imports the next, and the last the first. Empty: there is no cycle."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for other in sorted(imports[module]):
            if found := visit(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(imports) if (found := visit(module, []))), [])


@pytest.mark.parametrize("distribution", sorted(DISTRIBUTIONS))
def test_no_modules_of_a_distribution_import_each_other(distribution: str) -> None:
    modules = {module_name(path): tree for path, tree in trees(distribution)}
    imports = {name: imported(tree, modules) - {name} for name, tree in modules.items()}
    assert sum(map(len, imports.values())) > 0
    assert cycle(imports) == []


def test_a_cycle_of_modules_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
