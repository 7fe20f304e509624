"""The rollouts of a fabric whose models stay as they are."""

from __future__ import annotations

from collections.abc import Callable

from tools.failures import CommandError
from tools.supervisor.rollout.plan import RolloutPlan


class NoRollouts:
    """Refuses every rollout; see RolloutCommands in tools/supervisor/service/server.py."""

    async def start(self, plan: RolloutPlan) -> None:
        raise CommandError(f"{plan.version} stays where it is")

    async def follow(self, name: str, on_step: Callable[[str], None]) -> None:
        raise CommandError(f"there is no rollout of {name}")

    def roll_back(self, name: str) -> None:
        raise CommandError(f"there is no rollout of {name}")
