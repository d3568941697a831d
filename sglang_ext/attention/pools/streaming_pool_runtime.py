"""A server whose streaming heads have a pool of their own, in the scheduler: what it refuses and reports."""

from __future__ import annotations

import logging
from typing import Any

from sglang_ext.attention.pools.streaming_pool import StreamingRings
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import DECODE_FIELD, PREFILL_FIELD, PlanError

log = logging.getLogger(__name__)


class StreamingPoolRuntime:
    """Reads requests' options, and counts pages. One per process, scheduler thread only."""

    def __init__(self, config: AttentionConfig, rings: StreamingRings, runner: Any) -> None:
        self._config, self._rings, self._plan = config, rings, rings.plan
        self._requests = runner.req_to_token_pool
        self._allocator, self._pool = runner.token_to_kv_pool_allocator, runner.token_to_kv_pool
        log.info(
            "rings of %.1f MiB hold %d pages of streaming heads for each of %d requests",
            rings.bytes / 2**20,
            self._plan.ring,
            rings.rows - 1,
        )

    def on_request(self, req: Any) -> str | None:
        """Return the reason to refuse a new request, or None: all are prefilled and decoded alike."""
        params = req.sampling_params.custom_params
        texts = params if isinstance(params, dict) else {}
        try:
            if (text := texts.get(DECODE_FIELD)) is not None:
                decode = self._config.options.from_request(str(text))
                if decode.mode != "dense" or decode.offloaded or not decode.streaming:
                    raise PlanError(
                        "this server's streaming heads have a pool of their own, without their other pages, "
                        "and its other heads are dense: omit decode, or start it with "
                        "decode_heads_pool=shared"
                    )
            text = texts.get(PREFILL_FIELD)
            if text is not None and self._config.prefill.from_request(str(text)).mode != "dense":
                raise PlanError(
                    "sparse prefill does not go with a pool of their own for streaming heads: omit prefill, "
                    "or start the server with decode_heads_pool=shared"
                )
        except PlanError as error:
            return str(error)
        return None

    def describe(self) -> dict[str, Any]:
        """Return the sizes, and what requests hold now: ``held`` pages, where a page of all layers and heads
        counts as one. A running request holds all of its rings. For the control channel, of all ranks: only
        the first one is asked."""
        plan = self._plan
        share = plan.share
        running = self._requests.size - self._requests.available_size()
        other = (self._pool.size - self._allocator.available_size()) // plan.page
        return {
            "page_size": plan.page,
            "streaming_heads": share,
            "pages_per_request": plan.ring,
            "requests": self._requests.size,
            "ring_bytes": self._rings.all_bytes,
            "running": running,
            "other_pages": other,
            "held_pages": round((1 - share) * other + share * running * plan.ring, 2),
        }
