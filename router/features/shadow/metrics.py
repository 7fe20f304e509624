"""Exports a router's shadow traffic, by model and candidate."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from kvloom_common.models import likelihood_gap as gap
from router import metric_table as table


class ShadowMetrics:
    """The families."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.answers = table.SHADOW_SCORED_ANSWERS.family(registry)
        self.tokens = table.SHADOW_SCORED_TOKENS.family(registry)
        self.surprisal = table.SHADOW_SURPRISAL_NATS.family(registry)
        self.squared_tokens = table.SHADOW_TOKENS_SQUARED.family(registry)
        self.surprisal_tokens = table.SHADOW_SURPRISAL_TOKEN_PRODUCTS.family(registry)
        self.squared_gap = table.SHADOW_GAP_SQUARED.family(registry)
        self.generated = table.SHADOW_GENERATED_ANSWERS.family(registry)
        self.generated_tokens = table.SHADOW_GENERATED_TOKENS.family(registry)
        self.skipped = table.SHADOW_SKIPPED.family(registry)
        self.failed = table.SHADOW_FAILED.family(registry)
        self.duration = table.SHADOW_DURATION_SECONDS.family(registry)


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
