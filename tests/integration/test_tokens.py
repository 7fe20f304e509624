"""Tokens of OIDC providers: who is accepted, and above all who is not."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.identities import Identities
from kvloom_common.access.key_sets import MAX_BYTES
from kvloom_common.access.tokens import is_token
from kvloom_common.config import ConfigError, IssuerConfig
from kvloom_common.process.watched_files import following
from kvloom_common.tenancy.principal import Principal
from kvloom_common.tenancy.table import Tenant
from tests.fakes.fake_control import SEARCH_KEY, key_of, two_organisations
from tests.fakes.fake_issuer import ISSUER, FakeIssuer, fake_issuer
from tests.fakes.tenants import change, identities_of
from tests.waiting import eventually


@pytest.fixture
async def issuer() -> AsyncIterator[FakeIssuer]:
    async with fake_issuer() as started:
        yield started


async def principal_of(identities: Identities, token: str) -> Principal:
    assert is_token(token)
    return identities.at_once(token, b"") or await identities.later(token)


async def refusal_of(identities: Identities, token: str) -> str:
    with pytest.raises(KvloomError) as caught:
        await principal_of(identities, token)
    assert caught.value.reason == ErrorReason.ERROR_REASON_UNAUTHENTICATED
    assert token not in caught.value.message
    return caught.value.message


async def test_a_token_belongs_to_its_tenant_and_has_the_scopes_of_its_role(issuer: FakeIssuer, tmp_path: Path) -> None:
    """People sign in with what their organisation has already."""
    mapping = {
        "tenant_claim": "groups",
        "tenants": {"team-search": "acme/search"},
        "roles": {"operators": "admin", "guests": "reader"},
    }
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config(**mapping)])
    async with following(identities):
        groups = ["x", "team-search"]
        member = await principal_of(identities, issuer.token(groups=groups))
        assert (member.tenant, member.key_id, member.user) == ("acme/search", "oidc:login:ada@acme/search", "ada")
        assert set(member.scopes) == {"inference", "usage"}
        admin = await principal_of(identities, issuer.token(groups=groups, roles=["guests", "operators"]))
        assert admin.has_scope("admin")
        reader = await principal_of(identities, issuer.token(groups=groups, roles="guests"))
        assert not reader.has_scope("inference")
        assert "names no tenant" in await refusal_of(identities, issuer.token(groups=["x"]))
        assert "names no tenant" in await refusal_of(identities, issuer.token(groups={"team-search": 1}))
        assert identities.at_once(SEARCH_KEY, b"") is not None  # keys are accepted as well


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"aud": "other"}, "audience"),
        ({"aud": None}, "audience"),
        ({"aud": {"kvloom": 1}}, "audience"),
        ({"iss": "https://evil.example.com"}, "issuer"),
        ({"iss": None}, "issuer"),
        ({"exp": None}, "expires"),
        ({"exp": "never"}, "no time"),
        ({"exp": True}, "no time"),
        ({"exp": -1}, "no time"),
        ({"nbf": 2**40}, "not valid yet"),
        ({"iat": 2**40}, "not valid yet"),
        ({"sub": None}, "subject"),
        ({"sub": "a\nb"}, "subject"),
        ({"tenant": None}, "tenant"),
        ({"tenant": ["acme/search", "other/app"]}, "tenant"),
        ({"tenant": "acme/none"}, "belongs to no tenant"),
    ],
)
async def test_a_token_that_lacks_something_is_refused(
    issuer: FakeIssuer, tmp_path: Path, claims: dict[str, Any], why: str
) -> None:
    """Providers sign tokens for many services and many people."""
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config()])
    async with following(identities):
        await principal_of(identities, issuer.token())
        assert why in await refusal_of(identities, issuer.token(**claims))


async def test_an_expired_token_is_refused_also_if_it_was_accepted_before(issuer: FakeIssuer, tmp_path: Path) -> None:
    """Verified tokens are remembered, and must be forgotten in time."""
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config(leeway_seconds=0.0)])
    async with following(identities):
        token = issuer.token(exp=time.time() + 1.0)
        assert (await principal_of(identities, token)).expires_at < time.time() + 2
        assert "expired" in await refusal_of(identities, issuer.token(exp=int(time.time()) - 60))

        async def is_refused() -> bool:
            return not await is_accepted(identities, token)

        await eventually(is_refused, "the token is refused")


async def test_signatures_are_those_of_the_issuers_own_keys(issuer: FakeIssuer, tmp_path: Path) -> None:
    """Each of these has been a way into real services."""
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config()])
    async with following(identities):
        good = issuer.token()
        head, claims, signature = good.split(".")
        assert "algorithm" in await refusal_of(identities, issuer.forged_with_public_key())
        assert "signature" in await refusal_of(identities, issuer.token(key=FakeIssuer().keys[0]))
        for algorithm in ("none", "None", "HS256", "ES256K"):
            forged = _encoded({"alg": algorithm, "kid": issuer.keys[0].kid})
            assert "algorithm" in await refusal_of(identities, f"{forged}.{claims}.{signature}")
        es256 = _encoded({"alg": "ES256", "kid": issuer.keys[0].kid})  # accepted here, but not the key's
        assert "another algorithm" in await refusal_of(identities, f"{es256}.{claims}.{signature}")
        other = _encoded({"iss": ISSUER, "aud": "kvloom", "sub": "eve", "exp": 2**40, "tenant": "other/app"})
        assert "signature" in await refusal_of(identities, f"{head}.{other}.{signature}")
        crit = _encoded({"alg": "RS256", "kid": issuer.keys[0].kid, "crit": ["x"], "x": 1})
        assert "extensions" in await refusal_of(identities, f"{crit}.{claims}.{signature}")
        assert "malformed" in await refusal_of(identities, f"a.{claims}.{signature}")
        assert "too long" in await refusal_of(identities, issuer.token(more="x" * 10_000))
        assert (await principal_of(identities, good)).tenant == "acme/search"


async def test_keys_are_rotated_without_a_restart(issuer: FakeIssuer, tmp_path: Path) -> None:
    """A new key is read as soon as a token names it; tokens of a withdrawn one are refused although they were accepted
    before."""
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config()])
    async with following(identities):
        old = issuer.token()
        await principal_of(identities, old)
        issuer.rotate("ES256", keeps_old=True)
        await eventually_accepted(identities, issuer.token())
        await principal_of(identities, old)
        issuer.rotate("ES256")
        await eventually_accepted(identities, issuer.token())
        assert "key is not known" in await refusal_of(identities, old)


async def eventually_accepted(identities: Identities, token: str) -> None:
    """The keys are not read more often than the configuration says."""
    await eventually(lambda: is_accepted(identities, token), "the token is accepted")


async def is_accepted(identities: Identities, token: str) -> bool:
    try:
        await principal_of(identities, token)
    except KvloomError:
        return False
    return True


async def test_tokens_with_made_up_keys_do_not_flood_the_provider(issuer: FakeIssuer, tmp_path: Path) -> None:
    """Anybody can make a token that names a key nobody knows."""
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config(min_refetch_seconds=600.0)])
    async with following(identities):
        await principal_of(identities, issuer.token())
        before = issuer.num_fetches
        for number in range(50):
            await refusal_of(identities, issuer.token(header={"kid": f"made-up-{number}"}))
        assert issuer.num_fetches == before


async def test_the_last_keys_stay_while_the_provider_fails(issuer: FakeIssuer, tmp_path: Path) -> None:
    """What a provider publishes by mistake, or somebody else in its place, must neither stop the service nor fill its
    memory."""
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config(refresh_seconds=1.0)])
    async with following(identities):
        await principal_of(identities, issuer.token())
        for body in (b"", b"[]", b'{"keys": 1}', b"x" * (MAX_BYTES + 1)):
            issuer.body = body
            fetched = issuer.num_fetches
            await refusal_of(identities, issuer.token(header={"kid": "unknown"}))
            await principal_of(identities, issuer.token(sub=f"u{fetched}"))


async def test_a_set_without_usable_keys_accepts_nobody(issuer: FakeIssuer, tmp_path: Path) -> None:
    """A shared secret or a key for encryption in the set must not verify anything."""
    issuer.body = msgspec.json.encode(
        {"keys": [{"kty": "oct", "k": "AAAA", "kid": "o"}, {**issuer.keys[0].as_dict(private=False), "use": "enc"}, 7]}
    )
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config(algorithms=["RS256"])])
    async with following(identities):
        assert "key is not known" in await refusal_of(identities, issuer.token())


async def test_redirects_are_not_followed(issuer: FakeIssuer, tmp_path: Path) -> None:
    """Who can redirect the provider's address could bring keys of their own."""
    elsewhere = issuer.url.replace("/keys", "/elsewhere")
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config(jwks_url=elsewhere)])
    async with following(identities):
        assert "key is not known" in await refusal_of(identities, issuer.token())
        assert issuer.num_fetches == 0


async def test_keys_in_a_file_are_read_again(issuer: FakeIssuer, tmp_path: Path) -> None:
    """Fabrics without a way to the internet get the keys by other means."""
    path = tmp_path / "keys.json"

    def publish() -> None:
        path.write_bytes(msgspec.json.encode({"keys": [key.as_dict(private=False) for key in issuer.keys]}))

    publish()
    config = issuer.config(jwks_url="", jwks_file=str(path))
    identities = identities_of(tmp_path, two_organisations(), issuers=[config])
    async with following(identities):
        await principal_of(identities, issuer.token())
        issuer.rotate()
        publish()
        await eventually_accepted(identities, issuer.token())


async def test_the_table_can_limit_and_end_an_identity(issuer: FakeIssuer, tmp_path: Path) -> None:
    """An administrator must be able to act although tokens live for hours."""
    identities = identities_of(tmp_path, two_organisations(), issuers=[issuer.config()])
    async with following(identities):
        token = issuer.token(roles="x")
        assert set((await principal_of(identities, token)).scopes) == {"inference", "usage"}
        entry = key_of("", "acme/search", "oidc:login:ada@acme/search", scopes=("usage",), models=("a",))
        entry = msgspec.structs.replace(entry, digest=b"")
        change(identities, entry)
        limited = await principal_of(identities, token)
        assert (limited.scopes, limited.key_models) == (("usage",), ("a",))
        change(identities, msgspec.structs.replace(entry, expires_at=1.0))
        await refusal_of(identities, token)
        change(identities, Tenant("acme/search", disabled=True), removed_keys=["oidc:login:ada@acme/search"])
        await refusal_of(identities, token)


@pytest.mark.parametrize("url", ["http://login.example.com/keys", "file:///etc/passwd", "ftp://x/y", "keys"])
def test_keys_come_over_https_only(url: str, tmp_path: Path) -> None:
    """Who is in between could bring keys of their own."""
    with pytest.raises(ConfigError, match="https"):
        identities_of(tmp_path, [], issuers=[IssuerConfig(name="a", issuer=ISSUER, audiences=["k"], jwks_url=url)])


def _encoded(content: Any) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(content)).decode().rstrip("=")
