"""The form of receipts and the files of their keys."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvloom.v1.generation_pb2 import Guide, SamplingParams, StopConditions
from kvloom_common.receipts.key_files import public_path
from kvloom_common.receipts.keys import ReceiptKeyError, made_or_read, read_public_keys
from kvloom_common.receipts.receipt import SignedPrice, canonical, sampling_of, stop_of, wanted_of
from kvloom_common.tenancy.prices import Price


def test_a_request_survives_its_json() -> None:
    """What is computed again must be what was computed, to the last bit of every parameter."""
    sampling = SamplingParams(
        temperature=0.1 + 0.2, top_p=1e-7, seed=2**64 - 1, logit_bias={7: -1e-5}, guide=Guide(regex="é*")
    )
    stop = StopConditions(stop=["a", "é"], stop_token_ids=[5], ignore_eos=True)
    wanted = wanted_of([1, 2], sampling, stop, 9, [0])
    assert sampling_of(wanted) == sampling
    assert (stop_of(wanted).max_tokens, list(stop_of(wanted).stop)) == (9, ["a", "é"])


def test_the_canonical_form_has_no_fractions() -> None:
    """Programs in other languages write them differently, and would find another digest."""
    wanted = wanted_of([1], SamplingParams(temperature=0.7, logit_bias={1: 2.5}), StopConditions(), None, [0])
    price = SignedPrice.of(Price("p", "*", effective_from=1.5))
    assert not re.search(rb"[:,\[]-?[0-9]+[.e]", canonical([wanted, price]))
    assert price.price == Price("p", "*", effective_from=1.5)


def test_all_processes_get_one_key(tmp_path: Path) -> None:
    """Routers start at the same time, and one of them makes it."""
    path = tmp_path / "receipts.key"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(made_or_read, [path] * 8))
    assert len({signer.public for signer in made}) == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_replaced_key_still_verifies_what_it_has_signed(tmp_path: Path) -> None:
    """Receipts are kept for years."""
    path = tmp_path / "receipts.key"
    first = made_or_read(path).public
    path.unlink()
    second = made_or_read(path).public
    assert read_public_keys(public_path(path)).keys == [second, first]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Whoever has it can sign in the fabric's name."""
    path = tmp_path / "receipts.key"
    made_or_read(path)
    path.chmod(0o644)
    with pytest.raises(ReceiptKeyError, match="chmod 600"):
        made_or_read(path)
