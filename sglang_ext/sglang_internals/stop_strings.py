"""Keeps what may begin a stop string out of the outputs. SGLang 0.5.17 does so for streams, but not where the
newest character is still incomplete, nor in what it sends of other requests meanwhile, and what has been sent
is not retracted.

A stop string is looked for among the newest tokens, as many as it is usually written in. A model may take
more: as many as the stop string has bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

OUTPUT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
BEGINS = "sglang.srt.managers.schedule_batch.Req.check_match_stop_str_prefix"
TAIL = "sglang.srt.managers.schedule_batch.Req._stop_match_tail_len"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what the bytes of a part of a character decode to


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may begin a stop string, the longest such end.

    An incomplete character at the end may turn out to be anything, and is among them."""
    whole = text.rstrip(INCOMPLETE)
    most = 0
    for stop in stops:
        for count in range(min(len(stop), len(whole)), most, -1):
            if whole.endswith(stop[:count]):
                most = count
                break
    return most + len(text) - len(whole) if most else 0


def around_begins(original: Callable[..., Any], req: Any) -> bool:
    """Say whether the newest tokens have or may begin a stop string, as SGLang's method, which knows complete
    characters only."""
    from sglang_ext.stages import stages

    return bool(stages.run("stop strings", stages.ending([req]), _begins, req))


def _begins(req: Any) -> bool:
    stops = req.sampling_params.stop_strs
    if not stops:
        return False
    tail = req.tail_str()
    return any(stop in tail for stop in stops) or held_back(tail, stops) > 0


def around_output(original: Callable[..., Any], accumulator: Any, *, req: Any) -> Any:
    """Leave out an output of a request that is not streamed, which SGLang sends now and then, if its end may
    begin a stop string: it goes with the next one."""
    is_due = len(req.output_ids) % accumulator.default_force_stream_interval == 0
    if is_due and not req.stream and not req.finished() and req.check_match_stop_str_prefix():
        return None
    return original(accumulator, req=req)


def around_tail(original: Callable[..., Any], req: Any, new_accepted_len: int) -> Any:
    """Return the number of tokens that a stop string is looked for in."""
    stops = req.sampling_params.stop_strs
    bytes_ = max((len(stop.encode(errors="replace")) for stop in stops), default=0)
    # the first token may be the end of another character
    most = max(original(req, new_accepted_len), bytes_ + new_accepted_len)
    return min(most, len(req.output_ids))
