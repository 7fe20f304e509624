"""`kvloom whatif` against a fabric in which the change is really made: how far off the predictions are."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom
from tests.e2e.test_fabric_tenants import key_of

MODEL: Final = "smollm2-135m-instruct"
SECONDS: Final = 40.0
RATES: Final = {"acme/web": 2.0, "beta/app": 2.0, "gamma/app": 1.0}
"""Requests per second of each tenant."""
LIMITS: Final = {
    "tenant:acme/web": {"requests_per_minute": 30},
    "tenant:beta/app": {"tokens_per_minute": 4000},
    "tenant:gamma/app": {"max_output_tokens": 4},
}
PRICE: Final = {"prompt": "1", "cached": "0.25", "output": "4"}
CONFIG: Final = """
[control]
enabled = true
[router.decision_log]
path = "decisions.jsonl"
named = true
[shard.sim]
step_ms = 20.0
prefill_tokens_per_second = 2000.0
"""


class Change(NamedTuple):
    num_shards: int = 2
    policy: str = "ect"
    has_limits: bool = False


class Load:
    """The same requests at the same times, whatever becomes of them: conversations of three tenants."""

    def __init__(self, fabric: RunningFabric, keys: dict[str, str]) -> None:
        self._fabric = fabric
        self._keys = keys

    def send(self) -> None:
        rng = random.Random("whatif")
        requests = sorted(
            (
                at,
                tenant,
                f"Conversation {rng.randrange(6)} of {tenant}. " + "It is told once more. " * rng.randint(5, 60),
            )
            for tenant, rate in RATES.items()
            for at in (rng.uniform(0, SECONDS) for _ in range(round(rate * SECONDS)))
        )
        began = time.monotonic()
        with ThreadPoolExecutor(64) as pool:
            for at, tenant, text in requests:
                time.sleep(max(0.0, began + at - time.monotonic()))  # sleep: requests arrive at these times
                pool.submit(self._ask, self._keys[tenant], text)

    def _ask(self, key: str, text: str) -> None:
        body = {"model": MODEL, "prompt": text, "max_tokens": 24}
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._fabric.http_url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except urllib.error.HTTPError as error:
            error.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "limits.json").write_text(json.dumps(LIMITS))
    return tmp_path


@contextlib.contextmanager
def running(folder: Path, name: str, change: Change) -> Iterator[RunningFabric]:
    (folder / name).mkdir()
    config = folder / name / "kvloom.toml"
    config.write_text(CONFIG + f'[router.placement]\npolicy = "{change.policy}"\n')
    flags = ("--engine", "sim", "--shards", str(change.num_shards), "--config", str(config))
    fabric = RunningFabric.start(folder / name / "data", *flags)
    try:
        yield fabric
    finally:
        fabric.stop()


def run(folder: Path, name: str, change: Change) -> tuple[Path, dict[str, float]]:
    """(the decision log of the load, the bill of each tenant)"""
    with running(folder, name, change) as fabric:
        keys = {tenant: key_of(fabric, tenant)[1] for tenant in RATES}
        prices = [part for field, amount in PRICE.items() for part in (f"--{field}", amount)]
        assert run_kvloom("prices", "set", MODEL, *prices, env=fabric.env).returncode == 0
        for account, limits in LIMITS.items() if change.has_limits else ():
            given = [part for name, value in limits.items() for part in (f"--{name.replace('_', '-')}", str(value))]
            done = run_kvloom("limits", "set", account, *given, env=fabric.env)
            assert done.returncode == 0, done.stderr
        for key in keys.values():
            fabric.until_key_is_known(key)
        time.sleep(2)  # sleep: limits and prices reach each router by themselves, and no command tells when
        Load(fabric, keys).send()
        listed = run_kvloom("prices", "list", "--json", env=fabric.env)
        (folder / "prices.json").write_text(listed.stdout)

        def bills() -> dict[str, Any]:
            rows = json.loads(run_kvloom("usage", "show", "--by", "tenant", "--json", env=fabric.env).stdout)
            return {row["tenant"]: row for row in rows}

        log = folder / name / "decisions.jsonl"
        num_served = sum(
            '"ttft_seconds":0.' in line or '"ttft_seconds":1' in line for line in log.read_text().splitlines()
        )
        eventually("all is billed", lambda: sum(row["num_requests"] for row in bills().values()) >= num_served)
        return log, {tenant: float(row["cost"]) for tenant, row in bills().items()}


def figures(folder: Path, log: Path, *flags: str) -> dict[str, dict[str, dict[str, Any]]]:
    done = run_kvloom(
        "whatif", "--decisions", str(log), "--price", str(folder / "prices.json"), "--json", *flags, env={}
    )
    assert done.returncode == 0, done.stderr
    return {row["tenant"]: row for row in json.loads(done.stdout)}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_predictions_are_compared_with_what_happens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of each quantity, for each change: it is published in docs/how-to/whatif.md."""
    base, _ = run(folder, "base", Change())
    table: list[str] = []
    for change in (Change(), Change(has_limits=True), Change(num_shards=1), Change(policy="round_robin")):
        log, bills = run(folder, f"changed-{len(table)}", change)
        limits = ("--limits", str(folder / "limits.json")) if change.has_limits else ()
        predicted = figures(folder, base, "--shards", str(change.num_shards), "--policy", change.policy, *limits)
        happened = figures(folder, log)
        for tenant in (*RATES, "*"):
            will_be, was = predicted[tenant]["predicted"], happened[tenant]["recorded"]
            bill = bills[tenant] if tenant != "*" else sum(bills.values())
            cells = [f"{will_be[name]:.3f} / {was[name]:.3f}" for name in ("ttft_p50", "ttft_p99")]
            off = float(will_be["bill"]) / bill - 1
            table.append(
                f"| {change} | {tenant} | {will_be['refused']} / {was['refused']} | {' | '.join(cells)} | {off:+.1%} |"
            )
            assert will_be["refused"] == pytest.approx(was["refused"], abs=4)
            assert float(will_be["bill"]) == pytest.approx(bill, rel=0.1)
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *table, ""]))
