"""The house: what imports what, what costs nothing to import, and that the documents say what is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragserve.bench import curves
from ragserve.bench.readme import rewritten
from ragserve.config import Settings

REPO = Path(__file__).resolve().parents[2]
ROOMS = {
    "ragserve": REPO / "ragserve",
    "ragserve_index": REPO / "index" / "ragserve_index",
    "sglang_ext": REPO / "sglang_ext",
    "ragserve_kernels": REPO / "kernels" / "ragserve_kernels",
}
HEAVY = ("torch", "sglang", "faiss", "sentence_transformers", "transformers", "chonkie", "pypdfium2", "trafilatura")
MAX_LINES = 450
BESIDE_SGLANG = ("ragserve.engine.", "ragserve.cache.folder", "ragserve.calibration.streaming_heads")  # may import sglang_ext


def modules(room: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOMS[room].rglob("*.py")):
        parts = path.relative_to(ROOMS[room].parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def ours_imported_by(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, functions and `TYPE_CHECKING` blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:  # a relative one cannot leave its room
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] in ROOMS}


def allowed(room: str, module: str, imported: str) -> bool:
    """The arrows. ``imported`` may be a module or a name in one."""
    target = imported.split(".")[0]
    if target == room:
        return True
    if room == "ragserve":
        plain = imported == "sglang_ext" or imported.startswith("sglang_ext.protocol")
        inside = target == "sglang_ext" and module.startswith(BESIDE_SGLANG)
        measured = target == "ragserve_kernels" and module.startswith("ragserve.bench.")
        return target == "ragserve_index" or plain or inside or measured
    if room == "ragserve_index":
        return imported == "ragserve.errors" or imported.startswith("ragserve.errors.") or imported == "ragserve"
    return room == "sglang_ext" and target == "ragserve_kernels"


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room: str) -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules(room)
        for imported in sorted(ours_imported_by(path))
        if not allowed(room, module, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_scan_sees_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from sglang_ext.launch import y\n    import ragserve.errors\n    import json\n")
    assert ours_imported_by(path) == {"sglang_ext.launch", "sglang_ext.launch.y", "ragserve.errors"}
    assert not allowed("ragserve", "ragserve.api.app", "sglang_ext.launch")
    assert allowed("ragserve", "ragserve.api.app", "sglang_ext.protocol.ContextPlan")
    assert not allowed("ragserve", "ragserve.api.app", "ragserve_kernels")
    assert allowed("ragserve", "ragserve.engine.local", "sglang_ext.launch")
    assert not allowed("ragserve_index", "ragserve_index.store", "ragserve.config")


def test_importing_the_product_loads_nothing_heavy() -> None:
    names = [name for name, _ in modules("ragserve")]
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
    if loaded:
        sys.exit(f"importing {{name}} loads {{', '.join(loaded)}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_sglang_can_be_imported_after_programs() -> None:
    """And not before, on machines whose torchvision is a CUDA build: that is what the import hook is for."""
    script = "import ragserve.programs, sys; assert 'torch' not in sys.modules; import sglang; sglang.RuntimeEndpoint"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_says_what_it_is() -> None:
    paths = [path for room in ROOMS for _, path in modules(room)] + sorted((REPO / "examples").rglob("*.py"))
    silent = [str(path.relative_to(REPO)) for path in paths if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None]
    assert not silent, f"no docstring: {', '.join(silent)}"


def test_no_file_has_to_be_split() -> None:
    folders = ["ragserve", "index", "sglang_ext", "kernels", "tests", "scripts", "examples"]
    paths = [path for folder in folders for path in (REPO / folder).rglob("*") if path.suffix in {".py", ".md", ""} and path.is_file()]
    paths = [path for path in paths if "corpus/files" not in path.as_posix() and "__pycache__" not in path.parts]
    long = {str(path.relative_to(REPO)): n for path in paths if (n := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_the_build_ships_every_package() -> None:
    config = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {name for room in ROOMS for name, path in modules(room) if path.name == "__init__.py"}
    assert set(config["packages"]) == packages
    for room, folder in ROOMS.items():
        assert (folder / "py.typed").exists(), room
        assert "py.typed" in config["package-data"][room]


def test_readme_tables_are_in_sync() -> None:
    results = REPO / "examples" / "results"
    for path in (*results.glob("*.md"), REPO / "README.md"):
        text = path.read_text(encoding="utf-8")
        assert rewritten(text, results) == text, "run scripts/readme-tables"
    assert all(f"| `{name}` |" in text for name in Settings.model_fields)
    drawn = curves.picture(results)
    assert drawn is None or drawn == (results / curves.PICTURE).read_text(encoding="utf-8"), "run scripts/readme-tables"


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "examples/results/README.md",
        "examples/results/answers.md",
        "examples/results/first_token.md",
        "kernels/README.md",
        "sglang_ext/context/README.md",
    ],
)
def test_paths_that_documents_name_exist(name: str) -> None:
    path = REPO / name
    text = path.read_text(encoding="utf-8")
    links = {target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target}
    missing = [target for target in links if not (path.parent / target).exists()]
    tops = "ragserve|index|sglang_ext|kernels|tests|scripts|examples|requirements"
    quoted = {part for part in re.findall(rf"`((?:{tops})/[\w./-]+)`", text) if "<" not in part}
    missing += [target for target in quoted if not (REPO / target).exists()]
    assert links | quoted
    assert not missing, f"{name} names what is not there: {missing}"


def test_names_that_contributing_relies_on_exist() -> None:
    said = {
        "ragserve/config.py": ["StrategyName", "class Settings"],
        "ragserve/engine/stream.py": ["def payload"],
        "ragserve/engine/local.py": ["strategies="],
        "sglang_ext/context/selection/strategies.py": ["def strategy"],
        "ragserve/engine/remote.py": ["strategies="],
        "ragserve/answering/prompt.py": ["segments"],
        "ragserve/answering/results.py": ["class ContextUse"],
        "ragserve/ingest/parsers/__init__.py": ["PARSERS", "PARSER_VERSION"],
        "kernels/ragserve_kernels/_common.py": ["def use_triton"],
    }
    wrong = [f"{path}: {word}" for path, words in said.items() for word in words if word not in (REPO / path).read_text()]
    assert not wrong


def test_readme_shows_commands_and_code_that_exist() -> None:
    import typer

    from ragserve.cli import _register, app

    _register()
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    text = (REPO / "README.md").read_text(encoding="utf-8")
    shell = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    used = set(re.findall(r"^ragserve (\w+)", shell, re.MULTILINE))
    assert used
    assert used <= commands
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        compile(block, f"README.md, Python block {number}", "exec")


def test_pre_commit_runs_the_pinned_tools() -> None:
    import yaml

    config = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for repo in config["repos"] for hook in repo["hooks"]}
    pinned = set(re.findall(r"^([\w-]+)==", (REPO / "requirements" / "dev.txt").read_text(), re.MULTILINE))
    assert tools == {"ruff", "mypy"}
    assert tools <= pinned
