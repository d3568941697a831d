"""SGLang's torch-native attention backend, without recomputing cached prefixes.

SGLang 0.5.17 pads the queries of an extend with a row per cached token and attends with all of them. A
request with all but one token cached pays the attention of the whole prompt, and every chunk of a chunked
prefill pays for all before it. Here only the new rows attend. The arithmetic of a row is the same; without a
cached prefix the call is the same, too."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class TorchNativeCpuBackend(TorchNativeAttnBackend):
    """Replaces `TorchNativeAttnBackend`; sliding windows and encoder-decoders take the original path."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        *,
        scaling: float | None = None,
        enable_gqa: bool = False,
        **options: Any,  # causal, is_cross_attn, sliding_window_size
    ) -> torch.Tensor:
        """Attend causally from each request's new tokens to all its tokens; return ``output``.

        query, output: [new tokens of all requests, heads, head_dim]; k_cache, v_cache: [slots, kv_heads,
            head_dim];
        seq_lens: cached and new tokens of each request."""
        window = options.get("sliding_window_size")
        if encoder_lens is not None or not options.get("causal") or (window is not None and window > -1):
            original: Any = super()._run_sdpa_forward_extend
            return original(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                **options,
            )
        start = 0
        for row, total, new in zip(
            req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
        ):
            slots = req_to_token[row, :total]
            q = query[start : start + new].transpose(0, 1)[None]  # [1, heads, new, head_dim]
            k = k_cache[slots].transpose(0, 1)[None].to(q.dtype)  # [1, kv_heads, total, head_dim]
            v = v_cache[slots].transpose(0, 1)[None].to(q.dtype)
            # Row i of the new tokens stands at position total - new + i and sees everything up to itself.
            mask = (
                torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
                if 1 < new < total
                else None
            )
            attended = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=new == total, scale=scaling, enable_gqa=enable_gqa
            )
            output[start : start + new] = attended[0].transpose(0, 1)
            start += new
        return output
