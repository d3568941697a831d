"""Checks before an engine or a server loads anything: each failure is a message that says what to do."""

from __future__ import annotations

import time
from pathlib import Path

from ragserve.commands.doctor_checks import examine
from ragserve.config import Settings
from ragserve.engine import shared_store
from ragserve.errors import Conflict, InvalidRequest, Unavailable
from ragserve.retrieval.embedder import embedder_name
from ragserve.retrieval.remote_reranker import check_reranker
from ragserve.retrieval.reranker import reranker_names
from ragserve.sso.single_sign_on import check_installed

_OWNER_WAIT_S = 5.0  # a server that is being stopped saves its state


def check_engine(settings: Settings, *, writes: bool = True) -> None:
    """Raise the error that would end an engine's start, or of the data folder if a command ``writes`` to it.

    Raises Unavailable (the doctor's findings on data folder, engine, model and tokenizer) and InvalidRequest
    (no such model)."""
    subjects = [*(["data folder"] if writes else ()), "engine", "model"]
    own, elsewhere = Path(settings.tokenizer or settings.model), settings.engine_url or settings.workers
    if not elsewhere and own.exists() and not (own / "tokenizer.json").exists():  # loading it takes a second
        subjects.append("tokenizer")
    for check in examine(settings, subjects):
        if check.status == "fail":
            raise Unavailable(f"Cannot start: {check.name}: {check.found}.", hint=check.advice)
        if check.name == "model" and check.status == "warn":
            _fetch_config(settings.model)


def check_start(settings: Settings, *, worker: bool = False) -> None:
    """Raise the error that would end the start later. A ``worker`` has no registry.

    Raises the errors of `check_engine`, InvalidRequest (no such reranker, a wrong URL), Conflict (another
    server has the documents' KV), and the errors of opening the registry.
    """
    from ragserve.retrieval.document_store import open_store

    if settings.oidc_issuer is not None and not worker:
        check_installed()
    check_engine(settings)
    if worker:
        _check_worker(settings)
    else:
        embedder_name(settings)
        for name in reranker_names(settings):
            check_reranker(name)
        open_store(settings.model_copy(update={"index_device": "cpu"})).close()
    if settings.engine_elsewhere:
        return
    shared_store.check(settings)
    if settings.own_files:
        _check_owner(settings.data_dir / "kv")


def _check_worker(settings: Settings) -> None:
    if settings.engine_elsewhere:
        raise InvalidRequest(
            "A worker has the engine itself.", hint="Leave out --engine-url, --workers and --replicas."
        )
    if settings.api_key is None:
        raise InvalidRequest(
            "A worker needs an API key: whoever may call it reads and removes cached documents.",
            hint="Set RAGSERVE_API_KEY, and RAGSERVE_ENGINE_API_KEY of the server in front to the same.",
        )


def _check_owner(kv: Path) -> None:
    from ragserve.cache import folder

    until = time.monotonic() + _OWNER_WAIT_S
    while folder.in_use(kv):
        if time.monotonic() >= until:
            raise Conflict(
                f"Another server uses the document KV in {kv}.",
                hint="Stop it, give another --data-dir, or do without the disk tier: --kv-disk-bytes 0.",
                code="cache_in_use",
            )
        time.sleep(0.1)


def _fetch_config(model: str) -> None:
    """Download the configuration of a model that is not on this machine, to see that it can be had."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    cause: Exception
    try:
        hf_hub_download(model, "config.json")
        return
    except LocalEntryNotFoundError as error:
        why, cause = "it is not on this machine, and Hugging Face cannot be reached", error
    except GatedRepoError as error:
        why, cause = "it is gated: run `hf auth login` with an account that may use it", error
    except RepositoryNotFoundError as error:
        why, cause = "there is no such folder, and Hugging Face does not know it", error
    except EntryNotFoundError as error:
        why, cause = "it has no config.json", error
    raise InvalidRequest(
        f"Cannot load {model}: {why}.",
        hint="Give --model a folder with config.json, or a Hugging Face id.",
        code="model_not_found",
        param="model",
    ) from cause
