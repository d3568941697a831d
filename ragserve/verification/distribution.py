"""Compare the distributions of two contexts, for the first token or over a whole answer.

Over a whole answer the second context is teacher-forced: the engine lets it answer with the tokens of the
first one's answer, and the distributions before each of them are compared. So both continue the same text at
every token, and a difference at one token does not count again at those after it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragserve.engine.base import Engine, GenerateRequest
from ragserve.errors import EngineError
from ragserve.verification.engine_run import TimedAnswer, first_token
from sglang_ext.wire.protocol import MAX_TRACED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """An answer's tokens, the distribution before each of them (as the engine sent it), and its
    times."""

    ids: tuple[int, ...]
    distributions: Sequence[str]
    timed: TimedAnswer


@dataclass(frozen=True, slots=True)
class Closeness:
    """The difference at each token of an answer: KL(reference || other) in nats, whether both have the same
    most likely token, and the regret, 0 to 1: by how much less likely the reference finds the other's most
    likely token than its own. Where they agree it is 0, and where the reference itself is undecided between
    the two, it is small."""

    kl: tuple[float, ...]
    agrees: tuple[bool, ...]
    regret: tuple[float, ...]

    @classmethod
    def none(cls, tokens: int) -> Closeness:
        """Of an answer beside itself."""
        return cls((0.0,) * tokens, (True,) * tokens, (0.0,) * tokens)

    @property
    def mean_kl(self) -> float:
        """Nats a token."""
        return sum(self.kl) / len(self.kl)

    @property
    def agreement(self) -> float:
        """Share of the tokens."""
        return sum(self.agrees) / len(self.agrees)

    @property
    def mean_regret(self) -> float:
        """Share of the probability, a token."""
        return sum(self.regret) / len(self.regret)

    @property
    def same_answer(self) -> bool:
        """The other context's own greedy answer is the same, unless two tokens are equally likely."""
        return all(self.agrees)


async def answer_of(engine: Engine, request: GenerateRequest) -> ReferenceAnswer:
    """Answer greedily and keep the distribution before each token.

    Raises EngineError if the engine fails, or sends none."""
    count = min(request.sampling.max_new_tokens, MAX_TRACED)
    sampling = replace(request.sampling, max_new_tokens=count)
    timed = await first_token(engine, replace(request, sampling=sampling, distributions=count))
    ids, distributions = timed.last.output_ids, timed.last.distributions
    return ReferenceAnswer(tuple(ids[: len(distributions)]), checked(distributions, 1), timed)


async def given_answer(engine: Engine, request: GenerateRequest, ids: Sequence[int]) -> ReferenceAnswer:
    """Let a request answer with given tokens and keep the distribution before each token.

    Raises EngineError if the engine fails, or sends too few distributions."""
    count = len(ids)
    sampling = replace(request.sampling, max_new_tokens=count, stop=(), ignore_eos=True)
    forced = replace(request, sampling=sampling, distributions=count, forced=ids)
    timed = await first_token(engine, forced)
    return ReferenceAnswer(tuple(ids), checked(timed.last.distributions, count), timed)


async def forced_along(
    engine: Engine, request: GenerateRequest, reference: ReferenceAnswer
) -> tuple[Closeness, TimedAnswer]:
    """Let a request answer with the reference's tokens and compare. The prompt should be the reference's.

    Raises EngineError if the engine fails, or sends too few distributions."""
    led = await given_answer(engine, request, reference.ids)
    # In a thread: a server compares on the event loop that answers its users.
    close = await asyncio.to_thread(closeness, reference.distributions, led.distributions)
    return close, led.timed


def closeness(reference: Sequence[str], others: Sequence[str]) -> Closeness:
    """Compare distributions, as the engine sent them, token by token. Raises ValueError if one answer has
    more of them."""
    kls, agrees, regrets = [], [], []
    for one, other in zip(reference, others, strict=True):
        mine, its = decode(one), decode(other)  # one at a time: a vocabulary is large
        kls.append(kl(mine, its))
        agrees.append(bool(mine.argmax() == its.argmax()))
        regrets.append(regret(mine, its))
    return Closeness(tuple(kls), tuple(agrees), tuple(regrets))


def checked(distributions: Sequence[str], count: int) -> Sequence[str]:
    """Return what an engine sent. Raises EngineError if it is less than ``count``."""
    if len(distributions) < count:
        raise EngineError(
            f"The engine sent {len(distributions)} distributions instead of {count}.",
            hint="Does another version of ragserve run there?",
        )
    return distributions


def decode(text: str) -> NDArray[np.float64]:
    """Decode an engine's log-probabilities [vocabulary]."""
    import numpy as np

    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float64)


def regret(full: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The probability of full's most likely token less that of the other's, both by ``full``; 0 to 1, from
    log-probabilities [vocabulary]."""
    import numpy as np

    return float(np.exp(full.max()) - np.exp(full[other.argmax()]))


def kl(full: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """KL(full || other) in nats, from log-probabilities [vocabulary]; never below 0."""
    import numpy as np

    return max(0.0, float(np.sum(np.exp(full) * (full - other))))
