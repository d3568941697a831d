"""The fingerprint of a model's weights, by which cached KV and measurements are found again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STEP = 2**20  # bytes between two samples: a changed run of this length is always seen
_SAMPLE = 4096
_ENDS = 65_536
# Options of SGLang that make other weights, or other positions, of the same files
OPTIONS = ("revision", "quantization", "json_model_override_args", "torchao_config", "lora_paths")


def model_fingerprint(path: str, details: str = "", *, options: Mapping[str, Any] | None = None) -> str:
    """Return 16 hex digits over what determines a model's KV: its configuration, samples of its weight files,
    ``details``, and those of SGLang's ``options`` that change weights or positions.

    Sampling keeps the start of a large model fast: 4 KiB of every MiB, and both ends of each file. A model
    given by its hub id is known by the files of its local snapshot, or by the id where there is none.
    """
    options = options or {}
    digest = hashlib.blake2b(details.encode(), digest_size=8)
    for name in OPTIONS:
        if (value := options.get(name)) not in (None, "", "{}", [], {}):
            digest.update(f"{name}={value}".encode())
    folder = _folder(path, options.get("revision"))
    patterns = ("config.json", "*.safetensors", "*.bin", "*.gguf")
    files = [] if folder is None else sorted(file for pattern in patterns for file in folder.glob(pattern))
    if not files:
        digest.update(path.encode())
    for file in files:
        digest.update(f"{file.name}:".encode())
        add_samples(digest, file)
    return digest.hexdigest()


def add_samples(digest: hashlib.blake2b, file: Path) -> None:
    """Update a digest with a file's size, 4 KiB of every MiB of it, and both its ends."""
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb", buffering=0) as stream:
        digest.update(stream.read(_ENDS))
        for offset in range(_STEP, size - _ENDS, _STEP):
            stream.seek(offset)
            digest.update(stream.read(_SAMPLE))
        stream.seek(max(0, size - _ENDS))
        digest.update(stream.read(_ENDS))


def _folder(path: str, revision: str | None) -> Path | None:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(path, "config.json", revision=revision)
    except HFValidationError:  # a path that is not there
        return None
    return Path(config).parent if isinstance(config, str) else None
