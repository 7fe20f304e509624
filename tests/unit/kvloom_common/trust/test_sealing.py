"""What is stored in Redis is accepted only as this fabric stored it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.trust.seal import SealError
from kvloom_common.trust.sealing import SecretSealer
from kvloom_common.trust.secret import FabricSecret

SECRET = FabricSecret.draw()
SEALER = SecretSealer(SECRET)


def test_signed_records_and_encrypted_entries_are_read_back() -> None:
    """Another process with the same secret reads what this one wrote."""
    other = SecretSealer(FabricSecret.parse(SECRET.format(), ""))
    assert other.verified("key", SEALER.sign("key", b'{"a":1}')) == b'{"a":1}'
    assert other.decrypted("key", SEALER.encrypt("key", b"text")) == b"text"


@given(st.binary(max_size=64), st.text(max_size=16), st.text(max_size=16))
def test_nothing_can_be_moved_to_another_key(content: bytes, key: str, other: str) -> None:
    """Otherwise an attacker who can write to Redis could put one user's answer in another's place."""
    encrypted = SEALER.encrypt(key, content)
    assert SEALER.decrypted(key, encrypted) == content
    if key != other:
        with pytest.raises(SealError):
            SEALER.decrypted(other, encrypted)


@given(st.data())
def test_any_altered_byte_is_noticed(data: st.DataObject) -> None:
    """Both kinds of protection fail closed, and with one kind of error."""
    signed, encrypted = SEALER.sign("key", b'{"address":"h:1"}'), SEALER.encrypt("key", b"text")
    for sealed, unsealed, content in (
        (signed, SEALER.verified, b'{"address":"h:1"}'),
        (encrypted, SEALER.decrypted, b"text"),
    ):
        place = data.draw(st.integers(0, len(sealed) - 1))
        altered = bytearray(sealed)
        altered[place] ^= data.draw(st.integers(1, 255))
        with contextlib.suppress(SealError):
            assert unsealed("key", bytes(altered)) == content  # e.g. a byte in a name that is not read


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    """Anything can be in a Redis that others write to."""
    for unsealed in (SEALER.verified, SEALER.decrypted):
        with pytest.raises(SealError):
            unsealed("key", garbage)


def test_another_fabric_is_named_as_the_reason() -> None:
    """Two fabrics on one Redis is a mistake that operators make; the log must say so."""
    other = SecretSealer(FabricSecret.draw())
    with pytest.raises(SealError, match="another fabric"):
        SEALER.verified("key", other.sign("key", b"{}"))


def test_a_rotation_leaves_no_entry_unreadable() -> None:
    """An answer that began before a rotation can be taken over after it, until the old secret is dropped."""
    sealer = SecretSealer(SECRET)
    before = sealer.encrypt("key", b"text"), sealer.sign("key", b"{}")
    new = b"n" * 32
    sealer.replace_secret(SECRET.with_accepted(new).with_used(new))
    assert sealer.decrypted("key", before[0]) == b"text"
    assert sealer.verified("key", before[1]) == b"{}"
    sealer.replace_secret(SECRET.with_accepted(new).with_used(new).without_others())
    with pytest.raises(SealError, match="not accepted"):
        sealer.decrypted("key", before[0])
