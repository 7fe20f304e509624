"""The identity of one service is good for that service, and for nothing else of its fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from kvloom_common.config import FabricConfig, KvloomConfig
from kvloom_common.discovery.registry import records_of
from kvloom_common.private_file import write_private_file
from kvloom_common.tenancy.usage_stream import Stored, UsageStream
from kvloom_common.trust.fabric_trust import load_trust
from kvloom_common.trust.identity import ServiceIdentity, issue_identity, read_identity
from kvloom_common.trust.seal import SealError
from kvloom_common.trust.sealing import SecretSealer
from kvloom_common.trust.secret import FabricSecret, SecretError, read_secret
from kvloom_common.trust.shared_secret import IdentityTrust

SECRET: Final = FabricSecret.draw()
OTHERS: Final = (
    "kvloom:shard:gpu-8", "kvloom:router:127.0.0.1:1", "kvloom:metrics:127.0.0.1:1", "kvloom:{usage}:records",
    "kvloom:process-control:control", "kvloom:shard:gpu-77", "",
)  # fmt: skip
[OWN] = records_of("kvloom", "shard", "gpu-7")


def issued(secret: FabricSecret = SECRET, name: str = "gpu-7", role: str = "shard") -> ServiceIdentity:
    return issue_identity(secret, role, name, records_of("kvloom", role, name))


def test_its_own_record_is_that_of_the_fabric() -> None:
    """Routers verify it with the secret, and the service reads back what it has announced."""
    own, fabric = IdentityTrust(issued()).sealer, SecretSealer(SECRET)
    assert fabric.verified(OWN, own.sign(OWN, b"{}")) == b"{}"
    assert own.verified(OWN, fabric.sign(OWN, b"{}")) == b"{}"


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_record_is_signed_or_believed(name: str) -> None:
    """A shard that signed for another one would get its prompts; and usage is money."""
    own, fabric = IdentityTrust(issued()).sealer, SecretSealer(SECRET)
    with pytest.raises(SealError):
        own.sign(name, b"{}")
    with pytest.raises(SealError):
        own.verified(name, fabric.sign(name, b"{}"))
    with pytest.raises(SealError):
        fabric.verified(name, own.sign(OWN, b"{}"))


def test_no_usage_is_minted_and_no_journal_read() -> None:
    """Nor what control says of usage."""
    own, fabric = IdentityTrust(issued()).sealer, SecretSealer(SECRET)
    stream = UsageStream("kvloom", own)
    with pytest.raises(SealError):
        stream.entry("r0/1", [b"{}"])
    with pytest.raises(SealError):
        stream.stored_value("r0/1", Stored(9))
    with pytest.raises(SealError):
        own.encrypt(OWN, b"text")
    with pytest.raises(SealError):
        own.decrypted(OWN, fabric.encrypt(OWN, b"text"))
    for key in ("caller_key", "cache_key", "state_key"):
        with pytest.raises(SecretError):
            getattr(IdentityTrust(issued()), key)


@pytest.mark.parametrize("role", ["edge", "router", "control", "supervisor", "tools"])
def test_what_needs_the_secret_has_no_identity(role: str) -> None:
    """They sign usage, seal answers, or administer."""
    with pytest.raises(ValueError, match=role):
        issued(role=role)


def test_an_identity_contains_no_secret() -> None:
    """Neither the fabric's, nor a key from which others follow, nor an authority's key."""
    text = issued().format()
    found = issued()
    for key in (*SECRET.secrets, SECRET.identity, *SECRET.keys("registry").values(), SECRET.caller_key):
        assert key not in {one for keys in found.record_keys.values() for one in keys.values()}
        assert key.hex() not in text
    assert found.key not in repr(found).encode()
    assert b"PRIVATE" not in found.authorities + found.certificate


def test_it_is_loaded_for_its_own_service_only(tmp_path: Path) -> None:
    """A wrong file is a clear error at the start, and so is one that others may read, or that is damaged."""
    path = tmp_path / "identity"
    write_private_file(path, issued().format().encode())
    config = KvloomConfig(fabric=FabricConfig(secret_file=str(path)))
    assert isinstance(load_trust(config, ("shard",), "gpu-7"), IdentityTrust)
    for roles, name in ((("shard",), "gpu-8"), (("router",), "gpu-7"), (("router", "edge"), "gpu-7")):
        with pytest.raises(SecretError, match="identity of the shard 'gpu-7'"):
            load_trust(config, roles, name)
    with pytest.raises(SecretError, match="identity of one service"):
        read_secret(path)
    write_private_file(path, issued().format().encode()[:-9])
    with pytest.raises(SecretError, match="damaged"):
        read_identity(path)
    path.chmod(0o644)
    with pytest.raises(SecretError, match="other users"):
        load_trust(config, ("shard",), "gpu-7")


def test_it_ends_with_its_secret() -> None:
    """A rotation is what revokes it; one that is issued on the way is good on both sides of it."""
    new = b"n" * 32
    using = SECRET.with_accepted(new).with_used(new)
    old, between = IdentityTrust(issued()).sealer, IdentityTrust(issued(using)).sealer
    assert SecretSealer(using).verified(OWN, old.sign(OWN, b"{}"))
    after = SecretSealer(using.without_others())
    assert after.verified(OWN, between.sign(OWN, b"{}"))
    with pytest.raises(SealError):
        after.verified(OWN, old.sign(OWN, b"{}"))
