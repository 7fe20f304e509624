"""API keys: their file, and which keys are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.access.api_keys import (
    ApiKey,
    ApiKeys,
    check_name,
    digest_of,
    draw_key,
    parse_api_keys,
    read_api_keys,
    write_api_keys,
)
from kvloom_common.callers import Callers, bare_credential, require_one_of_each
from kvloom_common.config import ConfigError


def test_only_listed_keys_are_accepted() -> None:
    """An API that serves a key that nobody issued is open."""
    key = draw_key()
    callers = Callers(api_keys=ApiKeys([ApiKey("alice", digest_of(key))]))
    callers.check(key)
    for wrong in ("", key[:-1], key + "x", digest_of(key), "x" * 10_000, "\udcff"):
        with pytest.raises(KvloomError) as failure:
            callers.check(wrong)
        assert failure.value.reason == ErrorReason.ERROR_REASON_UNAUTHENTICATED
        assert not wrong or wrong not in failure.value.message


def test_keys_of_one_name_are_one_caller() -> None:
    """Who replaces a key must keep its cache and its requests."""
    old, new = draw_key(), draw_key()
    callers = Callers(api_keys=ApiKeys([ApiKey("alice", digest_of(old)), ApiKey("alice", digest_of(new))]))
    assert callers.name(old, "") == callers.name(new, "") == "key-alice"


def test_a_credential_is_the_same_in_every_header() -> None:
    """Clients of one user send the key as `Authorization: Bearer` or as `x-api-key`."""
    assert bare_credential("Bearer k", "") == bare_credential("bearer k", "other") == bare_credential("", "k") == "k"
    assert bare_credential("Basic dTpw", "") == "Basic dTpw"


def test_several_credentials_are_refused() -> None:
    """Which of them counts would depend on who reads them."""
    require_one_of_each([("x-user", "a"), ("x-user", "a"), ("x-team", "b")])
    with pytest.raises(KvloomError, match="x-user"):
        require_one_of_each([("x-user", "a"), ("x-team", "b"), ("x-user", "b")])


def test_the_file_keeps_no_key_and_is_private(tmp_path: Path) -> None:
    """Whoever reads a backup of the file must not be able to use the API."""
    path, key = tmp_path / "keys", draw_key()
    write_api_keys(path, [ApiKey("alice", digest_of(key), "2026-11-24")])
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_api_keys(path) == [ApiKey("alice", digest_of(key), "2026-11-24")]


@pytest.mark.parametrize(
    "line", ["alice", "alice kvl-secret", "alice sha256:12", f"a/b sha256:{'0' * 64}", f"a sha256:{'0' * 64} today x"]
)
def test_a_malformed_line_is_named_but_not_shown(line: str) -> None:
    """The fault is often a key in place of its hash: it must not get into logs."""
    with pytest.raises(ConfigError, match="keys, line 2") as failure:
        parse_api_keys(f"# heading\n{line}\n", "keys")
    assert "kvl-secret" not in str(failure.value)


@given(st.text())
def test_any_text_is_keys_or_one_error(text: str) -> None:
    """The file is written by hand, too."""
    try:
        keys = parse_api_keys(text, "keys")
    except ConfigError:
        return
    assert all(check_name(key.name) for key in keys)


def test_changes_are_reported() -> None:
    """Long streams end when their key is removed."""
    changes: list[str] = []
    keys = ApiKeys([])
    keys.on_change(lambda: changes.append("changed"))
    keys._use([ApiKey("a", digest_of("k"))])  # what `watch` does when the file has changed
    assert changes == ["changed"]
    assert keys.name_of("k") == "a"
