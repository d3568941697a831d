"""Builds the document cache of a scheduler process: SGLang's tree, the tiers below it and the runtime."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_ext.documents.fingerprint import model_fingerprint
from sglang_ext.protocol import KV_CONFIG_VARIABLE
from sglang_ext.state import current

log = logging.getLogger(__name__)
BLOCK = 16  # tokens of a host or disk page
_DEFAULT_HOST_BYTES = 256 * 2**20


def create_cache(context: Any) -> Any:
    """`RadixCacheFactory`. Raises ValueError for engine settings that composed contexts do not work with."""
    from sglang_ext.context.scheduler.runtime import ContextRuntime
    from sglang_ext.documents.radix import DocumentRadixCache
    from sglang_ext.documents.tier_store import TierStore
    from sglang_ext.documents.types import DiskConfig, KvShape

    args = context.server_args
    for flag, wanted, why in (
        ("disable_radix_cache", False, "documents live in the radix cache"),
        ("speculative_algorithm", None, "a draft model has no KV for composed slots"),
        ("pp_size", 1, "the recompute pass runs all layers in one process"),
        ("enable_dp_attention", False, "a pass on one rank would wait for the others for ever"),
        ("disaggregation_mode", "null", "composed slots are not transferred"),
    ):
        if getattr(args, flag) != wanted:
            raise ValueError(f"the ragserve cache does not work with {flag}={getattr(args, flag)!r}: {why}")
    if context.is_hybrid_swa or context.is_hybrid_ssm or context.enable_hierarchical_cache:
        raise ValueError(
            "the ragserve cache needs plain multi-head attention and replaces the hierarchical cache: "
            "turn that off"
        )
    config = json.loads(os.environ.get(KV_CONFIG_VARIABLE, "{}"))
    runner = context.tp_worker.model_runner
    pool = runner.token_to_kv_pool
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise ValueError("the ragserve cache needs KV laid out token by token: unset SGLANG_USE_HND_KVCACHE")
    shape = KvShape(pool.layer_num, pool.head_num, pool.head_dim, pool.dtype, BLOCK)
    fingerprint = model_fingerprint(
        args.model_path,
        f"{pool.dtype}|{args.load_format}|tp{context.tp_size}|block{BLOCK}",
        options=vars(args),
    )
    folder = config.get("disk_dir")
    disk = (
        DiskConfig(
            Path(folder),
            int(config.get("disk_bytes", 16 * 2**30)) // context.tp_size,
            backend=config.get("backend", "file"),
            extra=config.get("extra"),
        )
        if folder
        else None
    )
    tiers = TierStore(
        shape,
        fingerprint=fingerprint,
        host_bytes=int(config.get("host_bytes", _DEFAULT_HOST_BYTES)) // context.tp_size,
        disk=disk,
        pin=torch.device(runner.device).type == "cuda",
        rank=context.tp_rank,
        world=context.tp_size,
    )
    tree = DocumentRadixCache(params=context.params)
    current.runtime = tree.observer = ContextRuntime(
        model_runner=runner,
        tree=tree,
        tiers=tiers,
        fingerprint=fingerprint,
        block=BLOCK,
        analysis=_analysis_config(
            config, shape, runner.model_config.get_total_num_kv_heads(), context.tp_size
        ),
        texts=lambda: _texts(args, runner.model_config.vocab_size),
        attention=current.attention,
    )
    return tree


def _analysis_config(config: dict[str, Any], shape: Any, kv_heads: int, ranks: int) -> Any:
    from sglang_ext.analysis.document_analysis import Cut
    from sglang_ext.context.scheduler.composition import ANALYSIS_BYTES, AnalysisConfig
    from sglang_ext.context.selection.profile import Profile

    profile = Profile.of(config.get("samkv", {}), shape.layers, kv_heads)
    if ranks > kv_heads:  # ranks share heads, so votes over ranks would count a head twice
        profile = replace(profile, heads=())
    return AnalysisConfig(
        at_ingestion=config.get("analysis", "ingest") == "ingest",
        memory_bytes=int(config.get("analysis_bytes", ANALYSIS_BYTES)),
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
            "no tokenizer at %s (%s): documents are analysed behind drawn tokens, without sentences",
            args.tokenizer_path,
            error,
        )
        return Texts.drawn(vocabulary)
    return Texts.of(tokenizer, vocabulary)
