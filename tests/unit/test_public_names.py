"""`__all__`: sorted as ruff sorts it, and true; and the names that `ragserve` itself offers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ragserve
from ragserve import errors

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("ragserve", "index/ragserve_index", "sglang_ext", "kernels/ragserve_kernels")
PUBLIC = {"AsyncClient", "Client", "Rag", *errors.__all__}


def exported(tree: ast.Module) -> list[str] | None:
    """The value of ``__all__``, or None for a module without one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def bound(tree: ast.Module) -> set[str]:
    """Names that a module defines or imports at its top level, `TYPE_CHECKING` blocks included."""
    names: set[str] = set()
    for node in [one for top in tree.body for one in (top.body if isinstance(top, ast.If) else [top])]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
    return names


def order(name: str) -> tuple[int, str]:
    """Constants, classes, then everything else."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


MODULES = {
    str(path.relative_to(REPO)): names
    for folder in FOLDERS
    for path in sorted((REPO / folder).rglob("*.py"))
    if (names := exported(ast.parse(path.read_text(encoding="utf-8")))) is not None
}


@pytest.mark.parametrize("path", MODULES)
def test_all_is_sorted_and_every_name_exists(path: str) -> None:
    names = MODULES[path]
    assert names == sorted(set(names), key=order)
    missing = set(names) - bound(ast.parse((REPO / path).read_text(encoding="utf-8")))
    assert not missing, f"{path} exports what it does not define: {missing}"


def test_the_package_offers_exactly_the_documented_names() -> None:
    assert set(ragserve.__all__) == PUBLIC
    assert all(getattr(ragserve, name).__name__ == name for name in ragserve.__all__)
    assert ragserve.NotFound is errors.NotFound
    assert set(ragserve.__all__) <= set(dir(ragserve))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = ragserve.Nothing


def test_names_are_imported_on_first_use() -> None:
    """That SGLang can be imported then, on machines whose torchvision is a CUDA build, too, is shown by the
    example that `test_programs` runs as a process."""
    script = (
        "import ragserve, sys; assert 'httpx' not in sys.modules, 'importing loads nothing';"
        "from ragserve import Client, Rag; import ragserve.programs; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
