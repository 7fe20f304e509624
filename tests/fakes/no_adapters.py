"""The adapters of a fabric whose models stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvloom_common.config import AdapterConfig
from tools.failures import CommandError


class NoAdapters:
    """Refuses every change; see AdapterCommands in tools/supervisor/service/server.py."""

    async def load_adapter(self, model: str, adapter: AdapterConfig, on_step: Callable[[str], None]) -> None:
        raise CommandError(f"{model} stays as it is")

    async def unload_adapter(
        self, model: str, name: str, timeout_seconds: float, on_step: Callable[[str], None]
    ) -> None:
        raise CommandError(f"{model} stays as it is")

    async def list_adapters(self) -> Sequence[Any]:
        return []
