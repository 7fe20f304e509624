"""OpenAI's shapes of what the safety policy says of a text: the results of moderations, and of moderation in line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvloom.v1.router_service_pb2 import ModerateResponse

CATEGORIES: Final = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/intent",
    "self-harm/instructions",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
"""OpenAI's, which every result has. A rule of the policy belongs to one of them by its `category`."""


def model_of(answer: ModerateResponse) -> str:
    """The name that stands for a version of the policy."""
    return f"kvloom-policy-{answer.policy_revision}"


def result_objects(answer: ModerateResponse) -> Sequence[dict[str, Any]]:
    """One result for each text: OpenAI's categories and the policy's."""
    categories = dict.fromkeys((*CATEGORIES, *answer.categories))
    results: list[dict[str, Any]] = []
    for result in answer.results:
        found = set(result.categories)
        results.append(
            {
                "flagged": bool(found),
                "categories": {name: name in found for name in categories},
                # The policy's rules are broken or not: there is nothing between 0 and 1.
                "category_scores": {name: float(name in found) for name in categories},
                # No rule of the policy is about images, and one without a rule is about nothing.
                "category_applied_input_types": {
                    name: ["text"] if name in answer.categories else [] for name in categories
                },
            }
        )
    return results
