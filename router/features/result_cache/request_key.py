"""Makes a key of what an answer depends on, which says nothing about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec

from kvloom.sampling import is_greedy
from kvloom.text.token_ids import pack_token_ids
from kvloom.v1.generation_pb2 import Pooling, SamplingParams, StopConditions
from router.core.events import Request
from router.features.fingerprints import ModelFingerprint

KEY_BYTES: Final = 32


def request_key(
    secret: bytes, scope: str, fingerprint: ModelFingerprint, policy_revision: str, request: Request
) -> bytes:
    """`secret` has at most 64 bytes. `scope`: the requests of different ones share nothing. `policy_revision`: of the
    safety policy."""
    digest = hashlib.blake2b(key=secret, digest_size=KEY_BYTES)
    for part in _parts(scope, fingerprint, policy_revision, request):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts(scope: str, fingerprint: ModelFingerprint, policy_revision: str, request: Request) -> Iterable[bytes]:
    assert isinstance(request.sampling, SamplingParams)
    assert isinstance(request.stop, StopConditions)
    yield scope.encode()
    yield msgspec.msgpack.encode(fingerprint)
    yield policy_revision.encode()
    yield b"" if request.adapter is None else request.adapter.checksum.encode()
    yield pack_token_ids(request.prompt_token_ids)
    yield request.prompt_text.encode(errors="surrogatepass")
    yield msgspec.msgpack.encode((request.max_tokens, [choice.index for choice in request.choices]))
    if request.pooling is None:
        yield _sampling(request.sampling).SerializeToString(deterministic=True)
        yield request.stop.SerializeToString(deterministic=True)
    else:  # nothing is sampled
        assert isinstance(request.pooling, Pooling)
        yield b"pooling"
        yield request.pooling.SerializeToString(deterministic=True)


def _sampling(sampling: SamplingParams) -> SamplingParams:
    """Greedy decoding uses no random numbers, so its seed, which is mostly a drawn one, says nothing."""
    if not is_greedy(sampling):
        return sampling
    greedy = SamplingParams()
    greedy.CopyFrom(sampling)
    greedy.ClearField("seed")
    return greedy
