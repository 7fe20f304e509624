"""Exports a router's shadow traffic, by model and candidate."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from kvloom_common.metrics.buckets import LATENCY_SECONDS
from kvloom_common.models import likelihood_gap as gap
from kvloom_common.process.fast_metrics import CounterFamily, HistogramFamily

_PAIR: Final = ("model", "candidate")


class ShadowMetrics:
    """The families."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, about: str, *labels: str) -> CounterFamily:
            return CounterFamily(name, about, (*_PAIR, *labels), registry)

        self.answers = counter(gap.ANSWERS, "Answers that the candidate has scored. Unit: answers.")
        self.tokens = counter(gap.TOKENS, "Tokens of scored answers. Unit: tokens.")
        self.surprisal = counter(
            gap.SURPRISAL, "Sum of -log p of scored tokens, under the model or the candidate. Unit: nats.", "under"
        )
        self.squared_tokens = counter(
            gap.SQUARED_TOKENS, "Sum over scored answers of their squared number of tokens. Unit: tokens squared."
        )
        self.surprisal_tokens = counter(
            gap.SURPRISAL_TOKENS,
            "Sum over scored answers of -log p of all tokens times their number. Unit: nats times tokens.",
            "under",
        )
        self.squared_gap = counter(
            gap.SQUARED_GAP, "Sum over scored answers of the squared likelihood gap. Unit: nats squared."
        )
        self.generated = counter(
            "kvloom_router_shadow_generated_answers",
            "Answers that the candidate has generated and nobody has seen, by how they ended. Unit: answers.",
            "outcome",
        )
        self.generated_tokens = counter(
            "kvloom_router_shadow_generated_tokens",
            "Tokens of the candidate's answers, and of the model's answers to the same prompts. Unit: tokens.",
            "by",
        )
        self.skipped = counter(
            "kvloom_router_shadow_skipped",
            "Sampled answers that were not compared, by reason. Unit: answers.",
            "reason",
        )
        self.failed = counter(
            "kvloom_router_shadow_failed", "Requests that failed at the candidate. Unit: requests.", "error_type"
        )
        self.duration = HistogramFamily(
            "kvloom_router_shadow_duration_seconds",
            "From the sending of a request to the candidate to its end. Unit: seconds.",
            _PAIR,
            LATENCY_SECONDS,
            registry,
        )


class PairMetrics:
    """The series of one pair."""

    def __init__(self, metrics: ShadowMetrics, model: str, candidate: str) -> None:
        self._metrics = metrics
        self._pair = (model, candidate)
        self._answers = metrics.answers.labels(model, candidate)
        self._tokens = metrics.tokens.labels(model, candidate)
        self._surprisals = [metrics.surprisal.labels(model, candidate, under) for under in _UNDER]
        self._squared_tokens = metrics.squared_tokens.labels(model, candidate)
        self._products = [metrics.surprisal_tokens.labels(model, candidate, under) for under in _UNDER]
        self._squared_gap = metrics.squared_gap.labels(model, candidate)
        self.duration = metrics.duration.labels(model, candidate)

    def scored(self, num_tokens: int, under_model: float, under_candidate: float) -> None:
        """An answer with these surprisals, in nats."""
        self._answers.total += 1
        self._tokens.total += num_tokens
        self._squared_tokens.total += num_tokens * num_tokens
        for value, surprisal, product in zip(
            (under_model, under_candidate), self._surprisals, self._products, strict=True
        ):
            surprisal.total += value
            product.total += value * num_tokens
        self._squared_gap.total += (under_candidate - under_model) ** 2

    def generated(self, outcome: str, num_tokens: int, num_delivered_tokens: int) -> None:
        self._metrics.generated.labels(*self._pair, outcome).total += 1
        self._metrics.generated_tokens.labels(*self._pair, gap.UNDER_CANDIDATE).total += num_tokens
        self._metrics.generated_tokens.labels(*self._pair, gap.UNDER_MODEL).total += num_delivered_tokens

    def skipped(self, reason: str) -> None:
        self._metrics.skipped.labels(*self._pair, reason).total += 1

    def failed(self, error_type: str) -> None:
        self._metrics.failed.labels(*self._pair, error_type).total += 1


_UNDER: Final = (gap.UNDER_MODEL, gap.UNDER_CANDIDATE)
