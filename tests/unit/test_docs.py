"""Documents say what is true: their tables, paths, commands and code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.lib import curves
from benchmarks.lib.tables import rewritten
from ragserve.config import Settings
from ragserve.version import __version__

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "benchmarks" / "results"


def test_readme_tables_are_in_sync() -> None:
    for path in (*RESULTS.glob("*.md"), *(REPO / "docs").glob("*.md"), REPO / "README.md"):
        text = path.read_text(encoding="utf-8")
        assert rewritten(text, RESULTS) == text, "run scripts/readme-tables"
    settings = (REPO / "docs" / "settings.md").read_text(encoding="utf-8")
    missing = [name for name in Settings.model_fields if settings.count(f"| `{name}` |") != 1]
    assert not missing, (
        f"name them in one section of docs/settings.md, then run scripts/readme-tables: {missing}"
    )
    drawn = curves.picture(RESULTS)
    assert drawn is None or drawn == (RESULTS / curves.PICTURE).read_text(encoding="utf-8"), (
        "run scripts/readme-tables"
    )


def test_user_documents_leave_results_to_the_benchmarks() -> None:
    """At most one generated table of eight rows a page: the rest is on pages of benchmarks/results."""
    wrong = []
    for path in (REPO / "docs").glob("*.md"):
        tables = re.findall(
            r"<!-- table: (?!settings)([\w-]+).*?-->\n(.*?)<!-- /table -->", path.read_text(), re.DOTALL
        )
        rows = {name: sum(line.startswith("|") for line in body.splitlines()) - 2 for name, body in tables}
        if len(tables) > 1 or any(count > 8 for count in rows.values()):
            wrong.append(f"{path.name}: {rows}")
    assert not wrong, "move these tables to a page of benchmarks/results and link it: " + "; ".join(wrong)


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "kernels/README.md",
        "sglang_ext/context/README.md",
        "sglang_ext/README.md",
        "sglang_ext/attention/README.md",
        *(
            path.relative_to(REPO).as_posix()
            for folder in ("docs", "benchmarks", "benchmarks/*", "examples", "kernels/ragserve_kernels/*")
            for path in sorted(REPO.glob(f"{folder}/*.md"))
        ),
    ],
)
def test_paths_that_documents_name_exist(name: str) -> None:
    path = REPO / name
    text = path.read_text(encoding="utf-8")
    links = {target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target}
    missing = [target for target in links if not (path.parent / target).exists()]
    tops = "ragserve|index|sglang_ext|kernels|tests|scripts|benchmarks|examples|requirements"
    quoted = {part for part in re.findall(rf"`((?:{tops})/[\w./-]+)`", text) if "<" not in part}
    missing += [target for target in quoted if not (REPO / target).exists()]
    assert links | quoted
    assert not missing, f"{name} names what is not there: {missing}"


def test_names_that_contributing_relies_on_exist() -> None:
    said = {
        "ragserve/config.py": ["StrategyName", "class Settings"],
        "ragserve/engine/stream.py": ["def payload"],
        "ragserve/engine/local.py": ["strategies="],
        "sglang_ext/wire/request_options.py": ["STRATEGY_OPTIONS"],
        "sglang_ext/context/selection/base.py": ["class PartialSelection"],
        "sglang_ext/context/selection/strategies.py": ["def partial_selection"],
        "ragserve/engine/remote.py": ["strategies="],
        "ragserve/answering/prompt.py": ["segments"],
        "ragserve/answering/results.py": ["class ContextUse"],
        "ragserve/ingest/parsers/__init__.py": ["PARSERS", "PARSER_VERSION"],
        "kernels/ragserve_kernels/dispatch.py": ["def use_triton"],
        "tests/conftest.py": ["EXHAUSTIVE ="],
    }
    wrong = [
        f"{path}: {word}"
        for path, words in said.items()
        for word in words
        if word not in (REPO / path).read_text()
    ]
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


PACKAGES = [REPO / "sglang_ext", REPO / "index" / "ragserve_index"]
READMES = sorted(path for package in PACKAGES for path in package.rglob("README.md"))


def readme_id(path: Path) -> str:
    return path.parent.relative_to(REPO).as_posix()


@pytest.mark.parametrize("readme", READMES, ids=readme_id)
def test_a_package_readme_names_every_file(readme: Path) -> None:
    """Those of subfolders too, unless a README nearer to them does."""
    text = readme.read_text(encoding="utf-8")
    missing = [
        path.relative_to(readme.parent).as_posix()
        for path in sorted(readme.parent.rglob("*.py"))
        if path.name != "__init__.py"
        and next(folder for folder in path.parents if (folder / "README.md").exists()) == readme.parent
        and not re.search(rf"(?<!\w){re.escape(path.name)}", text)
    ]
    assert not missing, f"name in {readme_id(readme)}/README.md: {missing}"


@pytest.mark.parametrize("readme", READMES, ids=readme_id)
def test_a_package_readme_names_no_file_that_is_gone(readme: Path) -> None:
    """A path counts from the README's folder, its package or the repository; a test may be named alone."""
    package = next(package for package in PACKAGES if readme.is_relative_to(package))
    removed = re.findall(r"`(\w+\.py)`, \[removed since\]", readme.read_text(encoding="utf-8"))
    named = set(re.findall(r"`([\w./-]+\.py)`", readme.read_text(encoding="utf-8"))) - set(removed)
    wrong = [
        name
        for name in sorted(named)
        if not any((root / name).exists() for root in (readme.parent, package, REPO))
        and not (name.startswith("test_") and any((REPO / "tests").rglob(name)))
    ]
    assert not wrong, f"{readme_id(readme)}/README.md names what is not there: {wrong}"


def test_the_changelog_has_dated_releases_and_stays_short() -> None:
    text = (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)", text, re.MULTILINE)
    assert releases[0][0] == __version__
    assert releases == sorted(releases, reverse=True)
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    long = {section.split()[0]: len(section.split()) for section in sections if len(section.split()) > 2500}
    assert not long, f"over 2,500 words: {long}"


def test_the_readme_stays_short() -> None:
    text = (REPO / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert len(text.split()) <= 1100
