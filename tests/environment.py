"""What the environment must say before torch and its users are imported."""

from __future__ import annotations

import os


def set_environment() -> None:
    """No network, and no threads that spin: with more of them than cores these are ten times slower."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
