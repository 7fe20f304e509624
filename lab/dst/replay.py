"""Decides the events of a bundle again (`kvloom incident capture`), and names the first decision that differs."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

from router.core.placement import built_in_policy
from router.incidents.bundle import LoggedRun, parse, read_runs
from router.incidents.checkpoint import restore
from router.incidents.plain_events import decisions, from_plain, raised
from tools.failures import CommandError


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    number: int
    """The number of the event in the log."""
    at_seconds: float
    """Since the begin of the bundle."""
    event: str
    recorded: Any
    now: Any
    """The first of its decisions that differ; None: there is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayResult:
    num_events: int
    num_decisions: int
    difference: Difference | None
    broken: str
    """The invariant that the core breaks; "": none."""


def read_bundle(path: Path) -> LoggedRun:
    """Raises CommandError."""
    try:
        with gzip.open(path) as file:
            return read_runs(file.read().splitlines())[-1]
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise CommandError(f"{path}: not a bundle that can be read: {error}") from error


def replay(run: LoggedRun, policy: str | None = None) -> ReplayResult:
    """`policy`: place by another one from the begin on. It stops at the first decision that differs, and checks the
    core then. Raises CommandError for a bundle whose state this version of the core does not have."""
    try:
        core, verdicts = restore(run.state)
    except Exception as error:  # whatever a class raises that has changed
        raise CommandError(f"this version has no such state as {run.versions}: {error!r}") from error
    if policy is not None:
        core.use_policy(built_in_policy(policy))
    num_events = num_decisions = 0
    difference: Difference | None = None
    for line in run.lines:
        num_events += 1
        number, now, name, plain, noted, recorded = parse(line)
        event = from_plain(name, plain, verdicts)
        verdicts.extend(verdict == "1" for verdict in noted)
        try:
            found = json.loads(json.dumps(decisions(core.handle(event, now))))
        except Exception as error:  # as the router's own loop does
            found = [raised(error)]
        verdicts.clear()
        num_decisions += len(found)
        if found != recorded:
            pairs = itertools.zip_longest(recorded, found)
            then, now_decided = next(pair for pair in pairs if pair[0] != pair[1])
            at_seconds = now - run.began_at
            difference = Difference(number, at_seconds, f"{name} {json.dumps(plain)}", then, now_decided)
            break
    broken = ""
    try:
        core.check_integrity()
    except Exception as error:  # a broken core may raise anything
        broken = f"{type(error).__name__}: {error}"
    return ReplayResult(num_events, num_decisions, difference, broken)
