"""The groups of `scripts/test`: which tests share a process. A file of tests is in one of them whatever its
name is; those of engines go by the engine that they ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
OTHER_ENGINES = re.compile(r"\b(?:(?:parallel|stress|streaming)_server|small_engine)\b")
"""Fixtures of `tests/integration/conftest.py` whose tests are a group of their own."""
OWN_ENGINES = ("test_wheel.py",)
"""Tests that start an engine which nobody else asks: in the group that would end first."""
UNIT_GROUPS = {
    "indexes": ("index",),
    "ingestion": ("commands", "ingest"),
    "contexts": ("attention", "context", "documents", "kv_offload"),
    "routes": ("api",),
    "answers": ("answering", "bench", "campaigns", "client", "eval", "fleet", "retrieval", "verification"),
}
"""Folders of `tests/unit`; all others are a group, too."""


@dataclass(frozen=True)
class Group:
    """What a process of pytest is given; without paths it is `scripts/check`. ``engines``: its tests start
    servers."""

    name: str
    paths: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    engines: bool = False

    @property
    def arguments(self) -> list[str]:
        return [*self.paths, *(f"--ignore={path}" for path in self.ignored)]


def groups() -> list[Group]:
    """In the order in which they start."""
    integration = sorted((REPO / "tests" / "integration").glob("test_*.py"))
    others = tuple(
        file.relative_to(REPO).as_posix()
        for file in integration
        if file.name in OWN_ENGINES or OTHER_ENGINES.search(file.read_text(encoding="utf-8"))
    )
    units = {name: tuple(f"tests/unit/{folder}" for folder in own) for name, own in UNIT_GROUPS.items()}
    return [  # the longest first, or one core would have nothing to do at the end
        Group("engines", ("tests/integration",), ignored=others, engines=True),
        Group("other engines", others, engines=True),
        Group("units", ("tests/unit",), ignored=tuple(path for own in units.values() for path in own)),
        *(Group(name, paths) for name, paths in units.items()),
        Group("kernels", ("tests/kernels",)),
        Group("check", ()),
    ]
