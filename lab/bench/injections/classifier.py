"""Logistic regression on embeddings of texts, the threshold at which it is used, and a greedy attack on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from safety_svc.injections import InjectionWeights

Embed = Callable[[Sequence[str]], Any]
"""Returns the embeddings of texts, [texts, dimensions]."""
NORMAL_QUANTILE: Final = 1.959964
"""Half the width of a 95% confidence interval, in standard deviations."""
_RIDGE: Final = 1.0
_NEWTON_STEPS: Final = 12


class Share(NamedTuple):
    """A share of cases, and the ends of Wilson's 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


def share_of(num_hits: int, num_cases: int) -> Share:
    """Wilson's interval of hits among cases. There must be one case at least."""
    z2, share = NORMAL_QUANTILE**2, num_hits / num_cases
    middle = (share + z2 / (2 * num_cases)) / (1 + z2 / num_cases)
    half = math.sqrt(share * (1 - share) / num_cases + z2 / (4 * num_cases**2))
    half *= NORMAL_QUANTILE / (1 + z2 / num_cases)
    return Share(share, max(0.0, middle - half), min(1.0, middle + half))


class InjectionClassifier:
    """Says how much a text's embedding looks like that of an attack."""

    def __init__(self, weights: Any, threshold: float) -> None:
        """`weights` end with the constant; a score above `threshold` counts as an attack."""
        self._weights = weights
        self.threshold = threshold

    @classmethod
    def trained(cls, attacks: Any, harmless: Any, threshold: float = 0.0) -> InjectionClassifier:
        """Train on embeddings by Newton's method, with a penalty on the squares of the weights."""
        features = _with_constant(np.concatenate([attacks, harmless]))
        labels = np.concatenate([np.ones(len(attacks)), np.zeros(len(harmless))])
        weights = np.zeros(features.shape[1])
        penalty = np.full(features.shape[1], _RIDGE)
        penalty[-1] = 0.0
        for _ in range(_NEWTON_STEPS):
            chances = 1 / (1 + np.exp(-features @ weights))
            gradient = features.T @ (chances - labels) + penalty * weights
            curvature = (features * (chances * (1 - chances))[:, None]).T @ features + np.diag(penalty + 1e-9)
            weights -= np.linalg.solve(curvature, gradient)
        return cls(weights, threshold)

    def with_false_positives(self, share: float, harmless: Any) -> InjectionClassifier:
        """Return it with the threshold that this share of harmless texts exceeds."""
        return InjectionClassifier(self._weights, float(np.quantile(self.scores(harmless), 1 - share)))

    def weights(self, model: str) -> InjectionWeights:
        """Return it as the rule kind `injection` has it. `model`: the encoder."""
        rounded = (round(float(value), 5) for value in self._weights)
        return InjectionWeights(model, tuple(rounded), round(self.threshold, 5))

    def scores(self, embeddings: Any) -> Any:
        return _with_constant(embeddings) @ self._weights

    def num_found(self, embeddings: Any) -> int:
        """The number of texts that count as attacks."""
        return int((self.scores(embeddings) > self.threshold).sum())


def _with_constant(embeddings: Any) -> Any:
    values = np.asarray(embeddings, dtype=np.float64)
    return np.hstack([values, np.ones((len(values), 1))])


def harmless_suffixes_needed(
    classifier: InjectionClassifier, embed: Embed, attack: str, suffixes: Sequence[str], most: int
) -> int | None:
    """How many harmless sentences an attacker has to append until the attack no longer counts as one, who each time
    takes the sentence that lowers its score the most; None: `most` did not suffice."""
    text = attack
    for number in range(1, most + 1):
        candidates = [f"{text} {suffix}" for suffix in suffixes]
        scores = classifier.scores(embed(candidates))
        best = int(np.argmin(scores))
        text = candidates[best]
        if scores[best] <= classifier.threshold:
            return number
    return None
