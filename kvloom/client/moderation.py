"""`Moderation`, what the safety policy says of one text."""

from __future__ import annotations

import dataclasses

from kvloom.v1.router_service_pb2 import ModerateResponse


@dataclasses.dataclass(frozen=True, slots=True)
class Moderation:
    """The categories of the safety policy that a text belongs to. It is true if there is any."""

    categories: tuple[str, ...]
    """The categories of the rules that the text breaks, no matter if those are for prompts or for answers."""
    known_categories: tuple[str, ...]
    """All categories of the policy."""
    policy_revision: str
    """Identifies the version of the policy that was applied."""

    def __bool__(self) -> bool:
        return bool(self.categories)


def moderations(answer: ModerateResponse) -> list[Moderation]:
    known = tuple(answer.categories)
    return [Moderation(tuple(result.categories), known, answer.policy_revision) for result in answer.results]
