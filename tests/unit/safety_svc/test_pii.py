"""Personal data is found by its form and its check digits, and what only looks like it is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.v1.safety_service_pb2 import MaskWish
from safety_svc.masks import masks_of
from safety_svc.pii import PiiKind
from safety_svc.policy import PolicyError, SafetyPolicy, load_policy

FOUND = [
    ("email", "write to eve.o+x@mail.example.org.", "eve.o+x@mail.example.org"),
    ("phone", "call +49 30 901820 today", "+49 30 901820"),
    ("phone", "call +1 (415) 555-2671", "+1 (415) 555-2671"),
    ("card", "my card 4111 1111 1111 1111 ok", "4111 1111 1111 1111"),
    ("card", "4111-1111-1111-1111 123", "4111-1111-1111-1111"),
    ("iban", "to DE89 3704 0044 0532 0130 00 PLEASE", "DE89 3704 0044 0532 0130 00"),
    ("address", "host 192.168.7.1, port", "192.168.7.1"),
    ("address", "at 2001:db8::1 now", "2001:db8::1"),
    ("key", "token ghp_" + "a1B2" * 9, "ghp_" + "a1B2" * 9),
    ("key", "AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    ("national", "ssn 536-90-4399.", "536-90-4399"),
]
LEFT = [
    ("email", "a@b, @home, x@y."),
    ("phone", "+1 2 3, 1+12345678, +999 999 9999 99"),
    ("card", "4111 1111 1111 1112, 1234567890123456, 6654 3711 8579 7276"),
    ("iban", "DE88 3704 0044 0532 0130 00"),
    ("address", "version 1.2.3, 300.1.1.1, 12:30:45"),
    ("key", "AKIA, ghp_short, skeleton"),
    ("national", "536-90-43"),
]


def kind(finds: str) -> PiiKind:
    return PiiKind({"finds": finds, **({"national": ["us.ssn"]} if finds == "national" else {})})


@pytest.mark.parametrize(("finds", "text", "passage"), FOUND)
def test_what_is_found(finds: str, text: str, passage: str) -> None:
    """Exactly the passage, not the words beside it, and not more than the kind says."""
    own = kind(finds)
    found = own.find(text, 0)
    assert found is not None
    assert text[slice(*found)] == passage
    assert len(passage) <= own.max_length


@pytest.mark.parametrize(("finds", "text"), LEFT)
def test_what_is_left_alone(finds: str, text: str) -> None:
    """A false alarm would hide what the model must read."""
    assert kind(finds).find(text, 0) is None


POLICY = """
[[rules]]
name = "e-mail"
kind = "pii"
finds = "email"
mode = "mask"
tenants = {free = "off"}

[[rules]]
name = "staff"
patterns = ['emp-[0-9]{4}']
mode = "mask"
on_request = true
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SafetyPolicy:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(POLICY)
    return load_policy(path)


def test_placeholders_are_those_of_tenant_and_conversation(policy: SafetyPolicy) -> None:
    """The same text has the same one in every turn; without the key nobody can compute it."""
    text = "a@b.org, emp-1234, a@b.org, c@d.org"
    wish = MaskWish(tenant="acme", conversation="one", guardrails=["staff"])
    masks = masks_of(policy, text, wish, b"k")
    assert [text[mask.start : mask.end] for mask in masks] == ["a@b.org", "emp-1234", "a@b.org", "c@d.org"]
    first, staff, again, other = (mask.placeholder for mask in masks)
    assert (first == again, first == other) == (True, False)
    assert (first[:8], staff[:7]) == ("[E_MAIL-", "[STAFF-")
    for differs in (
        masks_of(policy, text, MaskWish(tenant="acme", conversation="two"), b"k"),
        masks_of(policy, text, MaskWish(tenant="rival", conversation="one"), b"k"),
        masks_of(policy, text, wish, b"other"),
    ):
        assert differs[0].placeholder != first
    assert len(masks_of(policy, text, MaskWish(tenant="acme"), b"k")) == 3
    assert not masks_of(policy, text, MaskWish(tenant="free"), b"k")
    hidden = "".join(mask.placeholder for mask in masks)
    assert not masks_of(policy, hidden, wish, b"k")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ("finds = 'smell'", "smell"),
        ("finds = 'national'", "national"),
        ("finds = 'national'\nnational = ['zz.nothing']", "national"),
        ("finds = 'email'\nnational = ['us.ssn']", "national"),
        ("", "finds"),
        ("finds = 'email'\ncolour = 'red'", "colour"),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, fields: str, says: str) -> None:
    """The author of a policy learns of mistakes when it is loaded."""
    path = tmp_path / "policy.toml"
    path.write_text(f"[[rules]]\nname = 'r'\nkind = 'pii'\n{fields}\n")
    with pytest.raises(PolicyError, match=rf"rule 'r': .*{says}"):
        load_policy(path)
