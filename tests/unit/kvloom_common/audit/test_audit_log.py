"""A log that tells when it was changed, and whose excerpts can be forgotten without changing it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.audit.keys import AuditKeys, Retention
from kvloom_common.audit.log import FOREVER, KEYS, AuditLog, BrokenChainError, heads, read_log
from tests.examples import num_examples

SECRET = "eve@example.org"


def opened(directory: Path, retention: Retention = FOREVER) -> AuditLog:
    log = AuditLog(directory, "safety-0", retention)
    _OPEN.append(log)
    return log


_OPEN: list[AuditLog] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def written(directory: Path, tenants: tuple[str, ...] = ("acme", "rival", "acme")) -> AuditLog:
    log = opened(directory)
    for number, tenant in enumerate(tenants):
        log.append("blocked", f"{SECRET} {number}", tenant=tenant, rule="codes", target="prompt")
    return log


def excerpts(directory: Path, log: AuditLog) -> list[str | None]:
    records = [line.record for line in read_log(directory)]
    found = [record for record in records if record.excerpt]
    return [log.keys.open(one.excerpt, one.tenant, one.day, one.safety_identifier) for one in found]


def test_excerpts_are_read_by_their_keys_only(tmp_path: Path) -> None:
    """Neither file has the text in clear; only the owner can read either."""
    log = written(tmp_path)
    assert excerpts(tmp_path, log) == [f"{SECRET} {number}" for number in range(3)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    for path in files:
        assert SECRET.encode() not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0


def test_erasure_takes_one_tenants_excerpts_and_the_chain_still_verifies(tmp_path: Path) -> None:
    """What was written after it can be read again."""
    log = written(tmp_path)
    before = heads(list(read_log(tmp_path)))
    assert log.keys.erase("acme") == 1
    assert excerpts(tmp_path, log) == [None, f"{SECRET} 1", None]
    assert heads(list(read_log(tmp_path))) == before
    log.append("blocked", "new", tenant="acme")
    assert excerpts(tmp_path, log) == [None, f"{SECRET} 1", None, "new"]


def test_erasure_takes_one_users_excerpts(tmp_path: Path) -> None:
    """Each user has keys of its own; those without a name share one. What older versions have sealed is still read."""
    log = opened(tmp_path)
    for user in ("", "ann", "ben"):
        log.append("blocked", f"{SECRET} {user}", tenant="acme", safety_identifier=user)
    day = next(read_log(tmp_path)).record.day
    assert log.keys.open(log.keys.seal("old", "acme", day), "acme", day, "ann") == "old"
    assert log.keys.erase("acme", "ann") == 1
    assert excerpts(tmp_path, log) == [f"{SECRET} ", None, f"{SECRET} ben"]
    assert log.keys.erase("acme") == 2
    assert excerpts(tmp_path, log) == [None, None, None]


def test_retention_destroys_old_keys(tmp_path: Path) -> None:
    """Those of the last days stay."""
    log = written(tmp_path)
    today = next(read_log(tmp_path)).record.day
    day = datetime.timedelta(days=1)
    old = log.keys.seal("old", "acme", today - 3 * day)
    younger = log.keys.seal("younger", "acme", today - 2 * day)
    opened(tmp_path, Retention(2)).append("flagged", tenant="acme")
    assert log.keys.open(old, "acme", today - 3 * day) is None
    assert log.keys.open(younger, "acme", today - 2 * day) == "younger"
    assert excerpts(tmp_path, log)[0] == f"{SECRET} 0"


@pytest.mark.parametrize("usual_days", [2, 0])
def test_tenants_have_a_retention_of_their_own(tmp_path: Path, usual_days: int) -> None:
    """A contract may ask for less than the operator keeps, or for more."""
    keys, day = AuditKeys(tmp_path / KEYS), datetime.timedelta(days=1)
    today = datetime.datetime.now(datetime.UTC).date()
    then = today - 3 * day
    sealed = {tenant: keys.seal("old", tenant, then) for tenant in ("short", "long", "usual", "kept")}
    by_tenant = {"short": 1, "long": 5, "kept": 0}
    opened(tmp_path, Retention(usual_days, by_tenant)).append("flagged", tenant="acme")
    gone = {tenant for tenant, excerpt in sealed.items() if keys.open(excerpt, tenant, then) is None}
    assert gone == ({"short", "usual"} if usual_days else {"short"})


@given(data=st.data())
@settings(max_examples=num_examples(30), deadline=None)
def test_any_change_breaks_the_chain(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Lines that are changed, removed, doubled or exchanged; only what is missing at the end shows by the head."""
    directory = tmp_path_factory.mktemp("log")
    written(directory, ("a", "b", "c", "d"))
    [path] = directory.glob("*.jsonl")
    before = heads(list(read_log(directory)))
    lines = path.read_bytes().splitlines(keepends=True)
    number = data.draw(st.integers(0, 3))
    match data.draw(st.sampled_from(("change", "remove", "double", "exchange"))):
        case "change":
            record = json.loads(lines[number])
            record["tenant"] += "x"
            lines[number] = json.dumps(record).encode() + b"\n"
        case "remove":
            del lines[number]
        case "double":
            lines.insert(number, lines[number])
        case _:
            lines[number], lines[number - 1] = lines[number - 1], lines[number]
    path.write_bytes(b"".join(lines))
    told, after = "", None
    try:
        after = heads(list(read_log(directory)))
    except BrokenChainError as error:
        told = str(error)
    assert f"{path.name}, line" in told or (after is not None and after != before)


def test_files_of_several_processes_are_read_together(tmp_path: Path) -> None:
    """Also when two begin at the same time."""
    for _ in range(3):
        opened(tmp_path).append("flagged", "text", tenant="acme")
    assert len(heads(list(read_log(tmp_path)))) == 3
    assert len(list((tmp_path / KEYS).iterdir())) == 1
