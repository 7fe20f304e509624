"""Which usage records are of one answer."""

from __future__ import annotations

from kvloom_common.tenancy.usage_record import answer_id_of
from tests.fakes.usage import usage_record


def test_the_parts_of_an_answer_belong_to_it() -> None:
    """Control finds in its records whether the prompt of a part has been paid."""
    whole = answer_id_of("m", [1, 2], 7, [0, 1])
    part = answer_id_of("m", [1, 2], 7, [1], is_part=True)
    assert whole != part
    assert usage_record(1, "a", answer_id=whole).answer == usage_record(2, "a", answer_id=part).answer


def test_another_model_prompt_or_seed_is_another_answer() -> None:
    """A caller who uses one id for several requests pays for each."""
    ids = [("m", [1, 2], 7), ("other", [1, 2], 7), ("m", [1, 3], 7), ("m", [1, 2], 8)]
    assert len({answer_id_of(*each, [0]).partition(".")[0] for each in ids}) == 4
