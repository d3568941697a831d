"""Builds the document cache of a scheduler process: SGLang's tree, the tiers below it and the runtime."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from sglang_ext.documents.fingerprint import model_fingerprint
from sglang_ext.documents.kv_config import kv_config, page_bits
from sglang_ext.state import current
from sglang_ext.wire.protocol import DOCUMENT_PAGE

log = logging.getLogger(__name__)
_DEFAULT_HOST_BYTES = 256 * 2**20


def create_cache(context: Any) -> Any:
    """`RadixCacheFactory`. SGLang's own cache serves exact strategies where documents cannot be kept."""
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    from sglang_ext.context.scheduler.composition import AnalysisConfig
    from sglang_ext.documents.pages.types import KvShape
    from sglang_ext.documents.radix import DocumentRadixCache
    from sglang_ext.documents.tier_store import TierStore
    from sglang_ext.process.exact_only import NO_DOCUMENTS, ExactTree, keep_exact, why_no_documents
    from sglang_ext.process.runtime import ContextRuntime

    args, runner = context.server_args, context.tp_worker.model_runner
    pool = runner.token_to_kv_pool
    config = kv_config()
    fingerprint = model_fingerprint(
        args.model_path,
        f"{pool.dtype}|{args.load_format}|tp{context.tp_size}|block{DOCUMENT_PAGE}",
        options=vars(args),
    )
    if (reason := why_no_documents(context)) is None:
        shape = KvShape(
            pool.layer_num, pool.head_num, pool.head_dim, pool.dtype, DOCUMENT_PAGE, page_bits(config)
        )
        tiers = TierStore(
            shape,
            fingerprint=fingerprint,
            host_bytes=int(config.get("host_bytes", _DEFAULT_HOST_BYTES)) // context.tp_size,
            disk=_disk_config(config, context.tp_size),
            remote=_remote_config(config, context.tp_size, context.tp_rank),
            pin=torch.device(runner.device).type == "cuda",
            rank=context.tp_rank,
            world=context.tp_size,
        )
        kv_heads = runner.model_config.get_total_num_kv_heads()
        analysis = _analysis_config(config, shape, kv_heads, context.tp_size)
        tree = DocumentRadixCache(params=context.params)
        cache = tree
    else:
        log.warning("%s", reason)
        cache = default_radix_cache_factory(context)
        if current.attention is not None:
            keep_exact(cache, current.attention.exact_tokens)
        # it has what is asked of a tree without documents
        tree, analysis = cast(DocumentRadixCache, ExactTree(cache)), AnalysisConfig()
        tiers = TierStore(NO_DOCUMENTS, fingerprint=fingerprint, host_bytes=0, disk=None, pin=False)
    current.runtime = tree.observer = ContextRuntime(
        model_runner=runner,
        tree=tree,
        tiers=tiers,
        fingerprint=fingerprint,
        block=DOCUMENT_PAGE,
        analysis=analysis,
        texts=lambda: _texts(args, runner.model_config.vocab_size),
        attention=current.attention,
        sessions_on_host=bool(config.get("sessions", False)),
        unsupported=reason,
    )
    if reason is None and current.attention is not None:
        current.attention.attach(tree, current.runtime.ranks)
        if current.composition is not None:
            current.attention.read_documents(tiers, current.composition.rotation)
    return cache


def _disk_config(config: dict[str, Any], ranks: int) -> Any:
    """Configuration of a rank's disk tier; None without a folder."""
    from sglang_ext.documents.pages.types import DiskConfig

    if not config.get("disk_dir"):
        return None
    return DiskConfig(
        Path(config["disk_dir"]),
        int(config.get("disk_bytes", 16 * 2**30)) // ranks,
        backend=config.get("backend", "file"),
        extra=config.get("extra"),
    )


def _remote_config(config: dict[str, Any], ranks: int, rank: int) -> Any:
    """Configuration of a rank's remote tier; None without a shared store."""
    from sglang_ext.documents.pages.types import RemoteConfig

    if not (remote := config.get("remote")):
        return None
    options = dict(remote["options"])
    if "global_segment_size" in options:
        options["global_segment_size"] //= ranks
    return RemoteConfig(
        remote["store"],
        options,
        journal=Path(remote["folder"]) / f"deletions-{rank}-of-{ranks}.json",
        min_value=float(remote["min_value"]),
        prefill_ms=None if remote.get("prefill_ms") is None else tuple(remote["prefill_ms"]),
    )


def _analysis_config(config: dict[str, Any], shape: Any, kv_heads: int, ranks: int) -> Any:
    from sglang_ext.analysis.document_analysis import Cut
    from sglang_ext.context.scheduler.composition import ANALYSIS_BYTES, AnalysisConfig
    from sglang_ext.context.selection.profile import Profile

    profile = Profile.of(config.get("samkv", {}), shape.layers, kv_heads)
    if ranks > kv_heads:  # ranks share heads, so votes over ranks would count a head twice
        profile = replace(profile, heads=())
    return AnalysisConfig(
        at_ingestion=config.get("analysis", "ingest") == "ingest",
        memory_bytes=int(config.get("analysis_bytes", ANALYSIS_BYTES)) // ranks,
        cut=Cut(int(config.get("block_tokens", 0))),
        profile=profile,
    )


def _texts(args: Any, vocabulary: int) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    from sglang_ext.analysis.texts import Texts

    try:
        tokenizer = get_tokenizer(
            args.tokenizer_path, tokenizer_mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError) as error:
        log.warning(
            "no tokenizer at %s (%s): documents are analysed after random tokens, without sentences",
            args.tokenizer_path,
            error,
        )
        return Texts.drawn(vocabulary)
    return Texts.of(tokenizer, vocabulary)
