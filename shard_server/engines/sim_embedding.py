"""The simulated engine's embeddings, a pure function of the prompt: texts that share tokens have similar vectors."""

from __future__ import annotations

import functools
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Final

import xxhash

from shard_server.engines.base import Pooling, PoolingKind

EMBEDDING_SIZE: Final = 64
_BYTES_PER_DIGEST: Final = 16
_MIDDLE: Final = 127.5


def sim_embedding(token_ids: Sequence[int], pooling: Pooling) -> bytes:
    """The vector of a prompt, as little-endian float32 [EMBEDDING_SIZE]."""
    if pooling.kind is PoolingKind.LAST:
        token_ids = token_ids[-1:]
    elif pooling.kind is PoolingKind.CLS:
        token_ids = token_ids[:1]
    mean = [sum(column) / len(token_ids) for column in zip(*map(_token_vector, token_ids), strict=True)]
    length = math.sqrt(math.fsum(value * value for value in mean)) or 1.0
    vector = array("f", [value / length for value in mean] if pooling.normalize else mean)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


@functools.lru_cache(maxsize=4096)
def _token_vector(token_id: int) -> tuple[float, ...]:
    """Each dimension is between -1 and 1."""
    seeds = range(EMBEDDING_SIZE // _BYTES_PER_DIGEST)
    digest = b"".join(xxhash.xxh3_128_digest(token_id.to_bytes(4, "little"), seed=seed) for seed in seeds)
    return tuple((byte - _MIDDLE) / _MIDDLE for byte in digest)
