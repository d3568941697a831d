"""Figures of a comparison on a question set, and what they verify.

What counts is not the mean that was measured but its upper confidence bound (`ragserve.profiles.bounds`)."""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 5.0  # points below full that a strategy may lose by references; the default of `verify_margin`
MIN_QUESTIONS = 100  # per set with labels: with fewer, two points of F1 are noise
MAX_F1_LOSS = 2.0  # points below full
# percent; if full itself scores less, F1 is inconclusive and only the distributions of such a set count
MIN_FULL_F1 = 20.0
# Sufficient by themselves, and all there is without labels, a token over whole answers of full prefill: KL in
# nats, and by how many percent full finds the strategy's most likely token less likely than its own.
MAX_ANSWER_KL = 0.01
MAX_REGRET = 2.0
MAX_KL = 0.02  # nats at the first token, mean over a set: instead of both in records of version 1
MAX_MISSED = 0.01  # share of questions that failed, or that another strategy answered


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one question set: F1 in percent, its difference from full in points (both None without
    labels), KL of the first token in nats, tokens kept and recomputed in percent of the document tokens, KL
    in nats, agreement and regret in percent over whole answers. A ``_bound`` is the 95 % confidence bound on
    the side of the larger loss, None in records of version 1; ``f1_loss_bound`` in points below full.

    By references (`ragserve.verification.question_probes`), in a namespace: ``score`` in percent over
    ``references`` probes, its difference from full in points, and the ``margin``, the smallest loss in points
    that is excluded at 95 %, below 0 where a gain is shown; ``different``: percent of the answers that differ
    from full's, ``unsupported`` of those that stand in no passage though full's do; ``retriever``: what
    brought the passages; ``ttft_ms`` and ``full_ttft_ms``: medians to the first token, the strategy's and
    full's; ``made_at``: when the namespace was made, Unix seconds; ``version``: that of its documents
    (`NamespaceInfo`). Earlier versions have none of these."""

    n: int
    f1: float | None
    f1_vs_full: float | None
    kl: float | None
    kept: float | None
    recomputed: float | None
    fallbacks: int = 0
    failed: int = 0
    f1_loss_bound: float | None = None
    answer_kl: float | None = None
    answer_kl_bound: float | None = None
    answer_agrees: float | None = None
    answer_agrees_bound: float | None = None  # of records before the regret was measured
    answer_regret: float | None = None
    answer_regret_bound: float | None = None
    score: float | None = None
    score_vs_full: float | None = None
    references: int = 0
    margin: float | None = None
    different: float | None = None
    retriever: str = ""
    unsupported: float | None = None
    ttft_ms: float | None = None
    full_ttft_ms: float | None = None
    made_at: float = 0.0
    version: int = 0

    @property
    def full_f1(self) -> float | None:
        """F1 of full prefill on the same questions, in percent; None without labels."""
        return None if self.f1 is None or self.f1_vs_full is None else self.f1 - self.f1_vs_full

    @property
    def f1_loss(self) -> float:
        """Points below full that the strategy may lose; 0 without labels."""
        return -(self.f1_vs_full or 0.0) if self.f1_loss_bound is None else self.f1_loss_bound

    @property
    def close(self) -> bool:
        """The distributions are so close that F1 need not be."""
        if self.answer_kl_bound is None or self.most_regret is None:
            return self.margin is None and self.kl is not None and self.kl <= MAX_KL
        return self.answer_kl_bound <= MAX_ANSWER_KL and self.most_regret <= MAX_REGRET

    @property
    def most_regret(self) -> float | None:
        """The bound of the regret, or of the tokens without agreement, which is no smaller."""
        if self.answer_regret_bound is not None or self.answer_agrees_bound is None:
            return self.answer_regret_bound
        return 100 - self.answer_agrees_bound

    @property
    def conclusive(self) -> bool:
        """Full answers enough of the set, nobody knows what it should answer, the distributions are close, or
        too many requests failed."""
        return self.failing or self.full_f1 is None or self.full_f1 >= MIN_FULL_F1 or self.close

    @property
    def failing(self) -> bool:
        """Too many questions failed, or were answered by another strategy."""
        return self.failed + self.fallbacks > MAX_MISSED * self.n

    def shortfall(self, margin: float = MARGIN) -> str | None:
        """Give the reason why these figures verify nothing; None if they verify the strategy. ``margin``:
        most points that it may lose by references."""
        if self.full_f1 is not None and self.n < MIN_QUESTIONS:
            return f"{self.n} questions, fewer than {MIN_QUESTIONS}"
        if self.failing:
            return f"{self.failed} failed, {self.fallbacks} answered by another strategy"
        if self.close:
            return None
        if self.margin is not None:
            return None if self.margin <= margin else f"{self.loss} (limit {margin:g})"
        if self.full_f1 is None:
            return f"over {self.n} answers without labels {self.distance}"
        if self.full_f1 < MIN_FULL_F1:
            return f"full has F1 {self.full_f1:.1f}, which proves nothing, and {self.distance}"
        if self.f1_loss > MAX_F1_LOSS:
            most = "" if self.f1_loss_bound is None else f", at 95 % at most {self.f1_loss_bound:.1f}"
            below = f"{-(self.f1_vs_full or 0.0):.1f} points below full{most}"
            return f"F1 {self.f1:.1f}, {below}, and {self.distance}"
        return None

    @property
    def loss(self) -> str:
        """The loss by references, in words."""
        gained, margin = self.score_vs_full or 0.0, self.margin or 0.0
        mean = f"{abs(gained):.1f} points {'above' if gained > 0 else 'below'} full"
        most = f"{-margin:.1f} above" if margin < 0 else f"{margin:.1f} below"
        return (
            f"over {self.references} probes {mean}, at 95 % {'at least' if margin < 0 else 'at most'} {most}"
        )

    def basis(self, margin: float = MARGIN) -> str:
        """What these figures verify a strategy by, in words."""
        if self.margin is not None and self.margin <= margin:
            if self.margin < 0:
                return f"verified by {self.references} questions: at least {-self.margin:.1f} points better"
            return f"verified by {self.references} questions at a margin of {self.margin:.1f} points"
        if self.full_f1 is not None:
            return f"verified by {self.n} questions with labels"
        earlier = "" if self.margin is not None else ", an earlier record: ragserve tune measures anew"
        return f"verified by {self.n} answers as full's{earlier}"

    @property
    def distance(self) -> str:
        """The distance of the distributions, beside its limits, in words."""
        if self.answer_kl_bound is None or self.most_regret is None:
            return "KL unknown" if self.kl is None else f"KL {self.kl:.3g}, above {MAX_KL}"
        regret = "" if self.answer_regret is None else f"{self.answer_regret:.2g} %, "
        return (
            f"KL a token is {self.answer_kl or 0.0:.3g}, at 95 % at most {self.answer_kl_bound:.3g} (limit "
            f"{MAX_ANSWER_KL}), regret {regret}at most {self.most_regret:.1f} % (limit {MAX_REGRET:.0f})"
        )
