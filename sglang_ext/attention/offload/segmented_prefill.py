"""Prompts that the pool cannot take: prefilled layer by layer onto host pages while they wait in SGLang's
queue (SparseServe, section 3.4)."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.attention.decode.decode_state import DecodeState
from sglang_ext.attention.decode.step_planner import StepPlanner
from sglang_ext.kv_offload.host.layer_segments import LayerSegments, memory_bytes
from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from sglang_ext.kv_offload.layer_writer import LayerWriter
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.sglang_internals import sglang_requests
from sglang_ext.sglang_internals.model import forward_stream
from sglang_ext.stages import stages
from sglang_ext.state import current
from sglang_ext.versions import settings_of

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache

log = logging.getLogger(__name__)

_ROWS = 8192  # in one call of a layer where prefills come in one piece
_CPU_ROWS = 2048  # as many on a CPU: what a layer computes of more leaves the processor's caches
_IN_FLIGHT = 2  # rounds of the scheduler whose segments the device may not have computed yet


@dataclass(eq=False, slots=True)
class _Job:
    """The prompt that is being prefilled. ``launched``: events behind the latest rounds' segments."""

    req: Any
    prefix: HostPrefix
    segments: LayerSegments
    launched: deque[Any] = field(default_factory=deque)


class SegmentedPrefill:
    """Prefills one prompt at a time, a segment before each of SGLang's batches. Scheduler thread only.

    Ranks do the same in the same rounds: decisions come from lengths, options and counts of free pages, and
    from a vote where the devices' free memory counts."""

    def __init__(
        self,
        planner: StepPlanner,
        offloaded: OffloadedRows,
        tree: DocumentRadixCache,
        runner: Any,
        inject: int | None,
    ) -> None:
        """``tree``: SGLang's prefix cache, ours. ``inject``: tokens times layers before a batch; None: a
        prefill chunk of SGLang's in every layer."""
        self._planner = planner
        self._offloaded = offloaded
        self._prefixes = HostPrefixes(offloaded)
        self._tree = tree
        self._runner = runner
        self._page = offloaded.page_size
        self._device = torch.device(runner.device)
        size = getattr(settings_of(runner.server_args), "chunked_prefill_size", None)
        rows = size if size is not None and size > 0 else _ROWS
        self._inject = rows * offloaded.kv.layers if inject is None else inject
        if self._device.type == "cpu":
            rows = min(rows, _CPU_ROWS)
        self.chunk = max(1, min(rows, self._inject) // self._page) * self._page
        self._writer = LayerWriter(offloaded, self.chunk)
        self._job: _Job | None = None
        self.take_next = False
        """Take the next prompt that may be offloaded as if the pool had no room: for the warm-up."""

    @property
    def running(self) -> int:
        """Prompts that are being prefilled."""
        return int(self._job is not None)

    # a new request

    def show_end(self, req: Any) -> str | None:
        """Let SGLang take a new request whose prompt does not fit the pool: until the prefill begins it sees
        the last token alone. Return the reason to refuse it, or None."""
        ids = req.origin_input_ids
        longest = self._runner.model_config.context_len
        if not self._asks(req) or len(ids) >= longest - 1 or not self.exceeds_pool(req):
            return None
        if (reason := self._refusal(req, is_queued=False)) is not None:
            return reason
        sglang_requests.limit_answer(req, longest)
        req.ragserve_decode.prompt.whole = ids
        req.origin_input_ids = req.origin_input_ids_unpadded = array("q", ids[-1:])
        req.ragserve_on_host = True
        return None

    def _asks(self, req: Any) -> bool:
        """True for a request that may be offloaded from the start: a plain one, long enough to have a lag."""
        options = self._planner.state(req).options
        if not options.offloaded or getattr(req, "ragserve", None) is not None:
            return False
        return self._planner.is_lagging(req, self._tokens(req))

    def _refusal(self, req: Any, *, is_queued: bool = True) -> str | None:
        """Say what of a prompt that the pool cannot take is not possible; None if nothing is asked for."""
        asked = {
            "sparse prefill": getattr(req, "ragserve_prefill", None) is not None,
            "hidden states of the prompt": bool(req.return_hidden_states),
            # SGLang sets the start after it has made the request
            "log-probabilities of the prompt": is_queued
            and req.return_logprob
            and 0 <= req.logprob_start_len < len(req.origin_input_ids),
            "input embeddings": req.input_embeds is not None or req.multimodal_inputs is not None,
            "a session": req.session is not None,
        }
        for what, is_asked in asked.items():
            if is_asked:
                return (
                    f"the prompt takes {self._tokens(req)} tokens, more than the KV pool, so it is prefilled "
                    f"layer by layer, without {what}: omit that, or raise max_total_tokens"
                )
        if current.composition is None:
            return (
                f"the prompt takes {self._tokens(req)} tokens, more than the KV pool, and the layers of this "
                "model cannot be run one by one: raise max_total_tokens"
            )
        return None

    def _tokens(self, req: Any) -> int:
        """Return the tokens whose KV a request's next forward pass ends with."""
        whole = self._planner.state(req).prompt.whole
        return len(req.origin_input_ids if whole is None else whole) + len(req.output_ids)

    def exceeds_pool(self, req: Any) -> bool:
        """True if SGLang could not admit the request to an empty pool, beside the part of its answer that it
        keeps room for."""
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        left = (req.sampling_params.max_new_tokens or 0) - len(req.output_ids)
        needed = self._tokens(req) + min(max(left, 0), CLIP_MAX_NEW_TOKENS) + 2 * self._page
        return bool(needed > self._tree.token_to_kv_pool_allocator.size)

    # a request that SGLang wants to admit

    def admit(self, adder: Any, req: Any, add: Callable[[], Any]) -> Any:
        """Run around SGLang's admission, which ``add`` calls; return its result.

        None: the request is no business of this class, or its KV is on the host now."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        state = self._planner.state(req)
        if self._job is not None and self._job.req is req:
            return AddReqResult.CONTINUE  # others may go first
        if req.to_finish is not None:
            is_ours = state.prompt.whole is not None or state.prompt.segmented
            return self.give_up(req, add) if is_ours else None
        if state.offload.prefix is not None or not self._asks(req):
            return None
        exceeds = self.exceeds_pool(req)
        if not exceeds:
            if state.options.offloaded is not True or self._job is not None or self._refusal(req) is not None:
                return None
            result = AddReqResult.NO_TOKEN if self.take_next else add()
            if result is not AddReqResult.NO_TOKEN or any(each is req for each in adder.can_run_list):
                return result
            self.take_next = False
        elif self._job is not None:
            return AddReqResult.CONTINUE
        elif (reason := self._restore(req, state)) is not None:
            return self._end(req, add, f"ragserve: {reason}")
        lacking = stages.run_alike("segments", stages.ending([req]), self._begin, req, state)
        if req.to_finish is not None:
            return self.give_up(req, add)
        if lacking is None:
            return AddReqResult.CONTINUE
        if not exceeds:
            return AddReqResult.NO_TOKEN
        if adder.can_run_list or not adder.running_batch.is_empty() or self._offloaded.waiting:
            return AddReqResult.CONTINUE  # they may give back what is lacking
        return self._end(
            req,
            add,
            f"ragserve: offloaded decoding: the prompt takes {self._tokens(req)} tokens, more than the KV "
            f"pool, and {lacking}",
        )

    def give_up(self, req: Any, add: Callable[[], Any]) -> Any:
        """End a request whose prompt is on the host and that will never be admitted, or has failed."""
        if req.to_finish is not None:
            return self._end(req, add, req.to_finish.message, HTTPStatus(req.to_finish.status_code or 500))
        return self._end(
            req,
            add,
            "ragserve: offloaded decoding: the prompt is on the host, and its resident blocks and answer "
            "take more slots than the KV pool has: raise max_total_tokens, or ask for fewer tokens or blocks",
        )

    def _end(
        self, req: Any, add: Callable[[], Any], message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST
    ) -> Any:
        """End a request with an error; SGLang admits it once more to report that."""
        state = self._planner.state(req)
        prefix = state.offload.prefix
        if prefix is not None and state.offload.row is None:
            self._prefixes.forget(prefix)
        state.offload.wait(None)
        state.prompt.whole = None
        req.ragserve_on_host = False
        sglang_requests.end(req, message, status)
        req.init_next_round_input(self._tree)
        return add()

    def _restore(self, req: Any, state: DecodeState) -> str | None:
        """Show SGLang the whole prompt. Return the reason to refuse the request, or None."""
        if (whole := state.prompt.whole) is None:
            return None
        if (reason := self._refusal(req)) is not None:
            return reason
        surplus = len(whole) - len(req.origin_input_ids)
        req.origin_input_ids = req.origin_input_ids_unpadded = whole
        state.prompt.whole = None
        if req.logprob_start_len > 0:
            req.logprob_start_len += surplus
        req.full_untruncated_fill_ids = array("q")
        req.init_next_round_input(self._tree)
        return None

    def _begin(self, req: Any, state: DecodeState) -> str | None:
        """Take host pages for the prompt's whole pages but its last token, and get ready. Return what is
        lacking for it, or None."""
        state.prompt.segmented = True
        ids = req.full_untruncated_fill_ids
        tokens = (len(ids) - 1) // self._page * self._page
        options, prefix, lacking = state.options, None, self._lacking(tokens)
        if lacking is None:
            selection = options.budget // self._page
            prefix = self._prefixes.reserve(
                *(req, tokens, selection, options.resident_blocks, state.counts),
                shared=options.mode == "progressive",
            )
        if prefix is None:
            state.prompt.segmented = False
            return lacking or (
                "there is no room for it on the host or on the link, or it has no more pages than "
                "resident_blocks: raise kv_offload_bytes or max_total_tokens"
            )
        state.offload.wait(prefix)
        req.ragserve_on_host = True
        write = partial(self._writer.write, prefix)
        with forward_stream(self._runner):
            # threads write to the pages behind this stream; copies of who had them before may be under way
            self._offloaded.copies.join()
            if prefix.host.is_cuda:  # segments read it on this stream
                prefix.host.record_stream(torch.cuda.current_stream(self._device))
            own = torch.tensor(ids[:tokens], dtype=torch.int64).to(self._device, non_blocking=True)
            self._job = _Job(req, prefix, LayerSegments(self._runner, own, self.chunk, write))
        return None

    def _lacking(self, tokens: int) -> str | None:
        """Say how much device memory is lacking for a prompt's segments, on any rank; None if there is
        enough."""
        wanted, left = 0, 0
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            wanted, left = memory_bytes(self._runner, tokens), free + cached
        if self._offloaded.bounds.ranks.all_agree(wanted <= left):
            return None
        return (
            f"its layers take {wanted / 2**30:.1f} GiB of device memory on each rank outside the pool (free "
            f"on this one: {left / 2**30:.1f}): lower mem_fraction_static or max_total_tokens"
        )

    # before SGLang schedules

    def before_schedule(self, queued: Iterable[Any]) -> bool:
        """Compute the next segments of the prompt at hand. Return True if it is complete, so that its request
        may be admitted. ``queued``: the requests in SGLang's queues; one that has left them is forgotten."""
        job = self._job
        if job is None:
            return False
        if not any(each is job.req for each in queued):
            self._stop()
            return False

        def failed(message: str) -> None:
            stages.ending([job.req])(message)
            self._stop()

        return bool(stages.run_alike("segments", failed, self._advance, job))

    def _advance(self, job: _Job) -> bool:
        if job.segments.left:
            if len(job.launched) >= _IN_FLIGHT:
                job.launched.popleft().synchronize()
            with forward_stream(self._runner):
                job.segments.advance(self._inject)
                if self._device.type == "cuda":
                    job.launched.append(torch.cuda.Event())
                    job.launched[-1].record()
            return False
        self._writer.wait()
        self._job = None
        job.prefix.counts.segmented_tokens += job.prefix.tokens
        job.req.already_computed, job.req._cache_breakdown_computed = job.prefix.tokens, True  # no cache hits
        return True

    def _stop(self) -> None:
        """Forget the prompt at hand. Its host pages are freed with its request, when nothing writes there."""
        self._job = None
        try:
            self._writer.wait()
        except Exception:
            log.exception("a copy to host pages failed, of a prompt that is forgotten")
