"""What is kept for long can be opened by the fabric that has sealed it, and by nobody else."""

from __future__ import annotations

import pytest

from kvloom_common.trust.seal import SealError
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.state_seal import StateSealer

SECRET = FabricSecret.draw()


def test_it_outlives_rotations_of_the_secret() -> None:
    """A webhook's secret is needed as long as the webhook."""
    rotated = SECRET.with_accepted(b"n" * 32).with_used(b"n" * 32).without_others()
    sealed = StateSealer(SECRET.state_key).seal("a", b"text")
    assert b"text" not in sealed
    assert StateSealer(rotated.state_key).opened("a", sealed) == b"text"
    assert SECRET.state_key not in (SECRET.caller_key, SECRET.cache_key)


def test_the_same_content_never_looks_the_same() -> None:
    """Who sees two seals learns nothing of their contents."""
    sealer = StateSealer(SECRET.state_key)
    assert sealer.seal("a", b"text") != sealer.seal("a", b"text")


def test_what_was_altered_or_belongs_elsewhere_is_refused() -> None:
    """Nor does a seal open under another name, such as another tenant's."""
    sealer = StateSealer(SECRET.state_key)
    sealed = sealer.seal("a", b"text")
    for number in range(len(sealed)):
        altered = sealed[:number] + bytes([sealed[number] ^ 1]) + sealed[number + 1 :]
        with pytest.raises(SealError):
            sealer.opened("a", altered)
    for wrong in (b"", sealed[:15], sealed[:20], sealed[:-1]):
        with pytest.raises(SealError):
            sealer.opened("a", wrong)
    with pytest.raises(SealError):
        sealer.opened("b", sealed)
    with pytest.raises(SealError):
        StateSealer(FabricSecret.draw().state_key).opened("a", sealed)


def test_without_a_secret_nothing_is_sealed() -> None:
    """As in a fabric of one process."""
    plain = StateSealer(b"")
    assert not plain.has_key
    assert plain.opened("b", plain.seal("a", b"text")) == b"text"
