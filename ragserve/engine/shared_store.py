"""The store of documents' KV that engines share (`kv_storage`), as the settings describe it."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.errors import InvalidRequest, Unavailable
from ragserve.profiles.costs import COSTS, FILE_NAME

log = logging.getLogger(__name__)


def config(settings: Settings, folder: str) -> dict[str, Any]:
    """Configure the remote tier of the scheduler processes, whose journal lies in ``folder``. Raises
    InvalidRequest for a broken cost profile."""
    from sglang_ext.documents.fingerprint import model_fingerprint

    fingerprint = model_fingerprint(settings.model, options=settings.engine_args)
    costs = COSTS.load(settings.data_dir / FILE_NAME, fingerprint)
    return {
        "store": settings.kv_storage,
        "options": settings.kv_storage_args,
        "folder": folder,
        "min_value": settings.kv_shared_value,
        "prefill_ms": None if costs is None else costs.exact,
    }


def check(settings: Settings) -> None:
    """Raise InvalidRequest for options that the store does not have, Unavailable where Mooncake is not
    installed. A store that is away is no error: requests go on without it. A shared folder is marked as the
    store's."""
    from sglang_ext.documents.remote.mooncake_process import load_libraries
    from sglang_ext.documents.remote.remote_options import folder_options, mooncake_options

    if not settings.shared_store:
        return
    check_options = mooncake_options if settings.kv_storage == "mooncake" else folder_options
    try:
        check_options(settings.kv_storage_args)
    except ValueError as error:
        raise InvalidRequest(
            f"kv_storage_args: {error}.",
            hint="See docs/shared-store.md: --kv-storage-args takes JSON.",
            param="kv_storage_args",
        ) from error
    if settings.kv_storage != "mooncake":
        _claim(folder_options(settings.kv_storage_args)[0])
        return
    if find_spec("mooncake") is None:
        raise Unavailable("Mooncake is not installed.", hint="pip install 'ragserve[mooncake]'")
    try:
        load_libraries()
    except OSError as error:
        raise Unavailable(
            f"Mooncake needs a system library: {error}.", hint="apt-get install libibverbs1"
        ) from error


def _claim(folder: Path) -> None:
    """Raise InvalidRequest for a shared folder that holds other files."""
    from sglang_ext.documents.remote.own_folder import ForeignFolder, claim

    try:
        claim(folder)
    except ForeignFolder as error:
        raise InvalidRequest(
            f"kv_storage_args: {error}.",
            hint=f"Make one inside it, such as {folder / 'ragserve'}.",
            param="kv_storage_args",
        ) from error
    except OSError as error:
        log.warning("the shared store's folder cannot be used yet: %s", error)
