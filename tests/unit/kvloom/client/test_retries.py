"""The failures that the SDK repeats by itself."""

from __future__ import annotations

import re

from kvloom.client.retries import RETRIED
from tests.conftest import REPOSITORY


def test_the_guide_says_which_failures_are_repeated() -> None:
    """A program that repeats what the SDK has repeated already asks an overloaded fleet nine times."""
    table = re.findall(
        r"^\| (`[A-Z_`, ]+) \| ([^|]+) \|", (REPOSITORY / "docs/how-to/sdk.md").read_text(), re.MULTILINE
    )
    said = {name for names, repeated in table if repeated != "no" for name in re.findall(r"\w+", names)}
    assert said == {reason.name for reason in RETRIED}
