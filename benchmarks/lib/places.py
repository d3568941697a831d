"""Folders of the repository that measurements read and write."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "benchmarks" / "results"
CORPUS = REPO / "examples" / "corpus"
