"""The embedding of a prompt, made from the hidden states of its tokens while they are computed in chunks."""

from __future__ import annotations

import sys
from typing import Final

import torch

from shard_server.engines.base import EngineRequest, Pooling, PoolingKind

_SCALE: Final = 2.0**24
_MAX_MAGNITUDE: Final = 2.0**16
"""Hidden states of a working model are a thousand times smaller. Below it, the sums of four million tokens fit into 63
bits."""


class PooledPrompt:
    """The sum over tokens is one of integers, in units of 2^-24: so it does not depend on how the prompt was cut."""

    __slots__ = ("_is_finite", "_kind", "_normalize", "_num_added", "_num_tokens", "_row", "_sum")

    def __init__(self, request: EngineRequest, default: PoolingKind) -> None:
        """`default` is the kind of a request that names none."""
        pooling = request.pooling or Pooling()
        self._kind = pooling.kind or default
        self._normalize = pooling.normalize
        self._num_tokens = len(request.prompt_token_ids)
        self._num_added = 0
        self._is_finite = True
        self._sum: torch.Tensor | None = None
        self._row: torch.Tensor | None = None
        """The hidden state of the token that LAST or CLS means."""

    def add(self, states: torch.Tensor, first_position: int) -> None:
        """Add float32 [tokens, hidden_size], the hidden states from `first_position` on. Tokens that were added before,
        and are computed again after a preemption, are left out."""
        states = states[self._num_added - first_position :]
        if not len(states):
            return
        if self._kind is PoolingKind.MEAN:
            self._is_finite = self._is_finite and bool((states.abs() < _MAX_MAGNITUDE).all())
            part = (states.double() * _SCALE).round_().to(torch.int64).sum(0)
            self._sum = part if self._sum is None else self._sum + part
        elif self._kind is PoolingKind.LAST or not self._num_added:
            self._row = states[-1 if self._kind is PoolingKind.LAST else 0].clone()
        self._num_added += len(states)

    def vector(self) -> bytes | None:
        """Little-endian float32 [hidden_size], once all tokens are added; None: the numbers are not finite."""
        assert self._num_added == self._num_tokens, "tokens are missing"
        if self._kind is PoolingKind.MEAN:
            assert self._sum is not None
            pooled = (self._sum.double() / (_SCALE * self._num_tokens)).float()
        else:
            assert self._row is not None
            pooled = self._row
        return packed_vector(pooled, normalize=self._normalize) if self._is_finite else None


def packed_vector(vector: torch.Tensor, *, normalize: bool) -> bytes | None:
    """float32 [size] as little-endian float32, scaled to the length 1 if so wanted; None: it is not finite."""
    if not vector.isfinite().all():
        return None
    if normalize:
        exact = vector.double()
        vector = (exact / exact.norm().clamp_min(1e-12)).float()
    values = vector.contiguous().numpy()
    return (values.byteswap() if sys.byteorder == "big" else values).tobytes()
