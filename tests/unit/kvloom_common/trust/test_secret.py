"""The fabric's secret: its text form, its file, and its rotation."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.trust.secret import FabricSecret, SecretError, made_or_read, read_secret, write_secret


def test_the_text_form_is_read_back() -> None:
    """The same secret must reach other machines, by file or environment."""
    secret = FabricSecret.draw()
    assert FabricSecret.parse(secret.format() + "\n", "here") == secret


@given(st.text(max_size=200))
def test_any_other_text_is_refused_with_its_source(text: str) -> None:
    """An operator must learn which file is wrong; a secret must not be accepted by half."""
    with pytest.raises(SecretError, match="somewhere"):
        FabricSecret.parse(text, "somewhere")


def test_a_secret_is_not_shown() -> None:
    """Tracebacks and logs show the representation of objects."""
    secret = FabricSecret.draw()
    shown = repr(secret) + str(secret)
    assert secret.format().split(":")[1] not in shown
    assert str(secret.secrets[0]) not in shown


def test_the_file_is_made_for_this_user_alone(tmp_path: Path) -> None:
    """The first start of a fabric makes its secret; later starts must find the same one."""
    path = tmp_path / "data" / "secret"
    secret = made_or_read(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert made_or_read(path) == secret


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """A secret that was readable is no secret; the message names the command that mends it."""
    path = tmp_path / "secret"
    write_secret(path, FabricSecret.draw())
    os.chmod(path, 0o644)
    with pytest.raises(SecretError, match="chmod 600"):
        read_secret(path)


def test_each_step_of_a_rotation_understands_its_neighbours() -> None:
    """Processes reload the file at different times: whatever one step uses, the steps beside it must accept."""
    old = FabricSecret.draw()
    new = b"n" * 32
    accepts = old.with_accepted(new)
    uses = accepts.with_used(new)
    done = uses.without_others()
    steps = [old, accepts, uses, done]
    for one, other in itertools.pairwise(steps):
        assert one.secrets[0] in other.secrets
        assert other.secrets[0] in one.secrets
    assert done.secrets == (new,)
    assert {step.fabric_id for step in steps} == {old.fabric_id}
    assert {step.caller_key for step in steps} == {old.caller_key}
