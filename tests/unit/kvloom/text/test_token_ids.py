"""Packed token ids are the same ids."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloom.text.token_ids import are_below, pack_token_ids, prompt_fields, token_array, unpack_token_ids
from tests.examples import num_examples
from tests.fakes.link_requests import make_submit

ids_of = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(ids_of)
def test_packing_is_undone(ids: list[int]) -> None:
    """A process reads what another one packs, and the bytes are the documented ones."""
    packed = pack_token_ids(ids)
    assert packed == b"".join(token_id.to_bytes(4, "little") for token_id in ids)
    assert packed == pack_token_ids(token_array(ids))
    assert unpack_token_ids(packed).tolist() == ids


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_other_numbers_are_no_ids(bad: list[int]) -> None:
    """They must not wrap around to another token."""
    with pytest.raises(OverflowError):
        pack_token_ids(bad)


def test_torn_ids_are_refused() -> None:
    """A frame of another format must not be read as token ids."""
    with pytest.raises(ValueError, match="multiple"):
        unpack_token_ids(b"\0" * 7)


@settings(max_examples=num_examples(200))
@given(ids_of, st.integers(1, 2**31), st.integers(0, 3000))
@example([49151], 49152, 1023)
@example([49152], 49152, 1024)
@example([2**31 - 1], 2**31, 2000)
@example([2**31], 2**31, 0)
@example([2**32 - 1, 0], 1, 1023)
def test_are_below_is_what_max_says(ids: list[int], limit: int, num_before: int) -> None:
    """The vocabulary check for many ids at once finds a bad id at any position."""
    everything = array("I", [limit - 1] * num_before) + array("I", ids)
    assert are_below(everything, limit) == (max(everything, default=0) < limit)


def test_prompt_fields_are_what_the_reader_knows() -> None:
    """A process of an earlier version gets the field that it understands."""
    assert make_submit(**prompt_fields([1, 2], packed=False)).prompt_token_ids == [1, 2]
    assert unpack_token_ids(make_submit(**prompt_fields([1, 2], packed=True)).packed_prompt_token_ids) == array(
        "I", [1, 2]
    )
