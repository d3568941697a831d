"""The scripts of benchmarks/: each can be imported, says how it is run, and is named by the README."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.integration.forked_starts import run_module

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def imported(path: Path) -> set[str]:
    """Modules that a file imports, also in functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_script_can_be_imported() -> None:
    done = run_module("tests.unit.benchmarks.import_scripts", *SCRIPTS, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_run(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert f"python -m benchmarks.{name}" in (ast.get_docstring(tree) or "")
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_helpers_import_no_script_and_the_product_imports_neither() -> None:
    scripts = tuple(f"benchmarks.{name}" for name in SCRIPTS)
    wrong = [
        f"{path.name} imports {name}"
        for path in (FOLDER / "lib").glob("*.py")
        for name in imported(path)
        if name.startswith(tuple(f"{script}." for script in scripts)) or name in scripts
    ]
    for package in ("ragserve", "sglang_ext", "index/ragserve_index", "kernels/ragserve_kernels"):
        for path in (FOLDER.parent / package).rglob("*.py"):
            if "benchmarks" in path.read_text(encoding="utf-8"):
                names = imported(path)
                wrong += [f"{path} imports {name}" for name in names if name.split(".")[0] == "benchmarks"]
    assert not wrong, "\n".join(wrong)


def test_the_readme_names_every_script_and_every_result() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.-]+)`", text))
    missing = [name for name in SCRIPTS if name not in named]
    missing += [path.name for path in FOLDER.glob("*.sh") if path.name not in named]
    missing += [path.name for path in (FOLDER / "lib").glob("[!_]*.py") if path.stem not in named]
    missing += [path.name for path in (FOLDER / "results").glob("*.json") if path.name not in named]
    assert not missing, f"benchmarks/README.md leaves out {', '.join(sorted(missing))}"
