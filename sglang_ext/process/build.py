"""Builds the document cache of a scheduler process: SGLang's tree, the tiers below it and the runtime."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from sglang_ext.documents.fingerprint import OPTIONS, model_fingerprint
from sglang_ext.documents.kv_config import kv_config, page_bits
from sglang_ext.state import current
from sglang_ext.wire.protocol import DOCUMENT_PAGE

log = logging.getLogger(__name__)
_DEFAULT_HOST_BYTES = 256 * 2**20


def create_cache(context: Any) -> Any:
    """`RadixCacheFactory`. SGLang's own cache serves exact strategies where documents cannot be kept."""
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    from sglang_ext.analysis.key_offsets import key_offsets
    from sglang_ext.analysis.texts import FIXED, digest_of
    from sglang_ext.attention.pools.quantized_pool import QuantizedKVPool
    from sglang_ext.context.compose.fused_question import is_plain
    from sglang_ext.context.scheduler.composition import AnalysisConfig
    from sglang_ext.documents.pages.types import KvShape
    from sglang_ext.documents.radix import DocumentRadixCache
    from sglang_ext.documents.tier_store import TierStore
    from sglang_ext.process.exact_only import NO_DOCUMENTS, ExactTree, why_no_documents
    from sglang_ext.process.runtime import ContextRuntime
    from sglang_ext.versions import keep_exact, settings_of

    args, runner = settings_of(context.server_args), context.tp_worker.model_runner
    pool = runner.token_to_kv_pool
    config = kv_config()
    reason = why_no_documents(context)
    tokenizer = _Tokenizer(args, runner.model_config.vocab_size)
    if isinstance(pool, QuantizedKVPool):
        offsets = key_offsets(runner, tokenizer.prefix(FIXED))
        if offsets is not None:
            pool.key_offsets.copy_(offsets)  # where graphs read them
    prefix = tokenizer.prefix(str(config.get("prefix", ""))) if reason is None and is_plain(runner) else []
    prefix = prefix[: runner.model_config.context_len // 4]
    about = f"{pool.dtype}|{args.load_format}|tp{context.tp_size}|block{DOCUMENT_PAGE}"
    options = {name: getattr(args, name, None) for name in OPTIONS}
    fingerprint = model_fingerprint(
        args.model_path,
        f"{about}|prefix {digest_of(prefix)}" if prefix else about,
        options=options,
    )
    if reason is None:
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
        analysis = _analysis_config(config, shape, kv_heads, context.tp_size, prefix)
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
        texts=tokenizer.texts,
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


def _analysis_config(config: dict[str, Any], shape: Any, kv_heads: int, ranks: int, prefix: list[int]) -> Any:
    from sglang_ext.analysis.document_analysis import Cut
    from sglang_ext.context.scheduler.composition import ANALYSIS_BYTES, AnalysisConfig
    from sglang_ext.context.selection.profile import Profile

    profile = Profile.of(config.get("samkv", {}), shape.layers, kv_heads)
    if ranks > kv_heads:  # ranks share heads, so votes over ranks would count a head twice
        profile = replace(profile, heads=())
    return AnalysisConfig(
        at_ingestion=config.get("analysis", "ingest") != "lazy",
        complete=config.get("analysis", "ingest") != "idle",
        memory_bytes=int(config.get("analysis_bytes", ANALYSIS_BYTES)) // ranks,
        cut=Cut(int(config.get("block_tokens", 0))),
        profile=profile,
        prefix=tuple(prefix),
    )


class _Tokenizer:
    """The model's tokenizer, loaded when it is first needed; random token ids where there is none."""

    def __init__(self, args: Any, vocabulary: int) -> None:
        self._args = args
        self._vocabulary = vocabulary

    def texts(self) -> Any:
        """Make the tokenizer's part in the analysis."""
        from sglang_ext.analysis.texts import Texts

        if self._loaded is None:
            return Texts.drawn(self._vocabulary)
        return Texts.of(self._loaded, self._vocabulary)

    def prefix(self, text: str) -> list[int]:
        """Token ids of the text that documents are prefilled behind; none of an empty one."""
        from sglang_ext.analysis.texts import Texts, prefix_of

        if text and self._loaded is None:
            return list(Texts.drawn(self._vocabulary).unrelated[0])
        return prefix_of(self._loaded, text) if text else []

    @cached_property
    def _loaded(self) -> Any:
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        args = self._args
        try:
            return get_tokenizer(
                args.tokenizer_path,
                tokenizer_mode=args.tokenizer_mode,
                trust_remote_code=args.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            log.warning(
                "no tokenizer at %s (%s): documents are analysed, and prefilled, behind random tokens, "
                "without sentences",
                args.tokenizer_path,
                error,
            )
            return None
