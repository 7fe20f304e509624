"""Long runs of the fuzzing targets: `python -m tests.fuzz.run --seconds 600 [TARGET ...]`, or `make fuzz`.

The targets take turns with random seeds. An input that fails is made as small as it can be and kept in the corpus, with
the command that replays it. Exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from typing import Any, Final

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.fuzz.corpus import CORPUS, keep_input
from tests.fuzz.target import Session, Target
from tests.fuzz.targets import TARGETS

ROUND_SECONDS: Final = 20.0
"""A target's turn. Each has a seed of its own, and starts what it fuzzes again."""
MAX_EXAMPLES: Final = 1_000_000
MAX_SHRINK_SECONDS: Final = 20.0


class RoundOver(KeyboardInterrupt):
    """The target's turn is over. Hypothesis ends for nothing else at once."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}; by default all")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to run, all targets together (60)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="of the first round")
    given_arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "Generating overly large repr")
    unknown = set(given_arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    names = given_arguments.targets or list(TARGETS)
    ends_at = time.monotonic() + given_arguments.seconds
    round_seed, num_failures = given_arguments.seed, 0
    while time.monotonic() < ends_at:
        for name in names:
            left = ends_at - time.monotonic()
            if left > 0:
                num_failures += not run_round(TARGETS[name], round_seed, min(ROUND_SECONDS, left))
        round_seed += 1
    return 1 if num_failures else 0


def run_round(target: Target, round_seed: int, seconds: float) -> bool:
    """Returns whether all examples passed."""
    begin = time.monotonic()
    num_examples = 0
    failed: tuple[Any, BaseException] | None = None
    fails_at = 0.0

    with Session(target) as session:

        @seed(round_seed)
        @settings(
            max_examples=MAX_EXAMPLES,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            print_blob=False,
        )
        @given(value=target.inputs)
        def example(value: Any) -> None:
            nonlocal num_examples, failed, fails_at
            now = time.monotonic()
            if failed is None and now - begin > seconds:
                raise RoundOver
            if failed is not None and now - fails_at > MAX_SHRINK_SECONDS:
                raise RoundOver  # hypothesis would shrink on for minutes
            num_examples += 1
            try:
                session.run(value)
            except Exception as error:
                fails_at = fails_at or now
                failed = (value, error)
                raise

        try:
            example()
        except RoundOver:
            pass
        except Exception:
            if failed is None:
                raise
    rate = num_examples / max(time.monotonic() - begin, 1e-9)
    _report(f"{target.name}: seed {round_seed}, {num_examples} examples, {rate:.0f}/s")
    if failed is None:
        return True
    value, error = failed
    path = keep_input(target.name, value, f"{type(error).__name__}: {str(error)[:300]}")
    traceback.print_exception(error, limit=-8, file=sys.stdout)
    replay = f"{path.parent.name}-{path.stem}"
    _report(f"{target.name}: FAILED. Kept as {path.relative_to(CORPUS.parent.parent.parent)}; replay it with")
    _report(f"    .venv/bin/python -m pytest tests/fuzz -k {replay}")
    return False


def _report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
