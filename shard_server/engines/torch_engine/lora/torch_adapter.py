"""The products of adapters with torch's operators.

Each row is a product of its own, always among INVARIANT_ROWS of them: libraries choose their code by the number of rows
of a product, and by the place of a row in it, and a row's bits must depend on neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.torch_engine.lora.peft import LoraWeights, Part
from shard_server.engines.torch_engine.operators.linear import INVARIANT_ROWS
from shard_server.engines.torch_engine.uploads import upload

_RANK_STEP: Final = 16
_CPU: Final = torch.device("cpu")


class TorchAdapter:
    def __init__(self, weights: LoraWeights, device: torch.device = _CPU) -> None:
        self.parts: Mapping[Part, tuple[torch.Tensor, torch.Tensor]] = {
            part: (_padded(a).T.contiguous().to(device), _padded(b.T).to(device))
            for part, (a, b) in weights.parts.items()
        }
        """A [in_features, rank] and B [rank, out_features], float32, the rank padded with zeros."""

    def delta(self, part: Part, x: torch.Tensor) -> torch.Tensor | None:
        """float32 [rows, out_features] for float32 `x` of a multiple of INVARIANT_ROWS rows; None: nothing changes."""
        matrices = self.parts.get(part)
        if matrices is None:
            return None
        a, b = matrices
        return torch.cat([_each_alone(_each_alone(rows, a), b) for rows in x.split(INVARIANT_ROWS)])


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """With a multiple of _RANK_STEP rows: others are multiplied by other code where they are not aligned."""
    return F.pad(rows, (0, 0, 0, -rows.shape[0] % _RANK_STEP)).contiguous()


def _each_alone(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, in_features] times weight [in_features, out_features], row by row."""
    return torch.bmm(x.unsqueeze(1), weight.expand(len(x), *weight.shape)).squeeze(1)


class Gated(Protocol):
    """silu(gate(x)) * up(x), whose factors can be had one by one."""

    def factors(self, x: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """gate(x) and up(x), float32."""
        ...


class AdaptedRows:
    """Groups the rows of a step by their adapters. Called by the model's forward pass after each product."""

    def __init__(self, adapters: Sequence[TorchAdapter | None], device: torch.device = _CPU) -> None:
        """`adapters`: by row. `device`: where the rows are."""
        of_adapter: dict[TorchAdapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                of_adapter.setdefault(adapter, []).append(row)
        self._groups: list[tuple[TorchAdapter, torch.Tensor, torch.Tensor]] = []
        """Adapters with their rows, and with these padded to a multiple of INVARIANT_ROWS."""
        for adapter, rows in of_adapter.items():
            padded = rows + rows[:1] * (-len(rows) % INVARIANT_ROWS)
            indices = upload(padded, device)
            self._groups.append((adapter, indices[: len(rows)], indices))

    def add(self, layer: int, modules: Mapping[str, slice], x: torch.Tensor, out: torch.Tensor) -> None:
        """Add what adapters change to the columns of `out` [rows, ..] that `modules` names, for inputs `x`."""
        for adapter, rows, padded in self._groups:
            inputs = x[padded].float()
            for module, columns in modules.items():
                delta = adapter.delta((layer, module), inputs)
                if delta is not None:
                    changed = out[rows, columns].float() + delta[: len(rows)]
                    out[rows, columns] = changed.to(out.dtype)

    def gate(self, layer: int, gated: Gated, x: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the gated product again for the rows whose factors adapters change."""
        for adapter, rows, padded in self._groups:
            inputs = x[padded].float()
            deltas = [adapter.delta((layer, module), inputs) for module in ("gate_proj", "up_proj")]
            if deltas[0] is None and deltas[1] is None:
                continue
            gate, up = (
                factor if delta is None else factor + delta
                for factor, delta in zip(gated.factors(x[padded]), deltas, strict=True)
            )
            out[rows] = (F.silu(gate) * up)[: len(rows)].to(out.dtype)
