"""What was metered against what was delivered."""

from __future__ import annotations

from kvloom.v1.usage_service_pb2 import MeteredAnswer
from kvloom_common.delivery_log import WitnessLine
from tools.usage.reconcile import reconcile


def metered(request_id: str, num_output_tokens: int) -> MeteredAnswer:
    return MeteredAnswer(request_id=request_id, num_output_tokens=num_output_tokens)


def test_equal_counts_are_no_difference() -> None:
    """The ordinary case, with an answer to two prompts, whose requests are metered one by one."""
    found = reconcile(
        [metered("a", 5), metered("b.0", 2), metered("b.1", 3), metered("direct", 9)],
        [WitnessLine("a", 5), WitnessLine("b", 5), WitnessLine("refused", 0, is_complete=False)],
    )
    assert found.is_exact
    assert (found.num_exact, found.num_without_witness, found.num_metered_tokens) == (2, 1, 10)


def test_every_token_too_many_or_too_few_is_found() -> None:
    """A comparison that overlooks one would prove nothing."""
    found = reconcile([metered("a", 6), metered("b", 4)], [WitnessLine(name, 5) for name in "abc"])
    assert not found.is_exact
    assert (found.num_over, found.num_under, len(found.differences)) == (1, 2, 3)


def test_tokens_on_their_way_to_a_client_that_left_are_no_difference() -> None:
    """A router cannot know that the client has just gone; but it may never have metered fewer than arrived."""
    broken_off = WitnessLine("a", 5, is_complete=False)
    assert reconcile([metered("a", 7)], [broken_off]).num_in_flight_tokens == 2
    assert not reconcile([metered("a", 4)], [broken_off]).is_exact


def test_an_answer_that_moved_to_another_edge_counts_with_its_last_witness() -> None:
    """The first edge had only a part of it."""
    lines = [WitnessLine("a", 3, is_complete=False), WitnessLine("a", 8)]
    assert reconcile([metered("a", 8)], lines).num_exact == 1
    assert reconcile([metered("a", 8)], lines[::-1]).num_exact == 1


def test_answers_under_one_id_are_told_apart_and_their_prompts_compared() -> None:
    """A client outside the fabric used one id for twelve answers, and had thousands of tokens computed as its own."""
    answers = [MeteredAnswer(request_id="r", answer_id=one, num_output_tokens=5, num_prompt_tokens=9) for one in "ab"]
    lines = [WitnessLine("r", 5, answer_id=one, num_prompt_tokens=9) for one in "ab"]
    assert reconcile(answers, lines).num_exact == 2
    assert reconcile(answers[:1], lines).num_under == 1
    answers[1].num_prompt_tokens = 2
    found = reconcile(answers, lines)
    assert (found.num_under, found.differences) == (1, ["r: metered a prompt of 2, computed 9"])


def continued(begin: int, end: int, **fields: bool) -> WitnessLine:
    return WitnessLine("r", end, answer_id="a", num_prompt_tokens=9, num_resumed_tokens=begin, **fields)


def answer(num_prompt: int, num_output: int) -> MeteredAnswer:
    return MeteredAnswer(request_id="r", answer_id="a", num_prompt_tokens=num_prompt, num_output_tokens=num_output)


def test_a_continued_answer_is_one_and_a_repeated_one_is_two() -> None:
    """As in usage records: the last router's line has all of it, also what a killed router has not written down."""
    assert reconcile([answer(9, 40)], [continued(0, 25), continued(25, 40)]).num_exact == 1
    assert reconcile([answer(9, 40)], [continued(25, 40)]).num_exact == 1
    assert reconcile([answer(18, 80)], [continued(0, 40), continued(0, 40)]).num_exact == 1
    assert reconcile([answer(9, 40)], [continued(0, 40), continued(0, 40)]).num_under == 1


def test_what_a_hung_router_sent_to_a_client_that_was_gone_is_no_difference() -> None:
    """Its record was corrected, and the client has continued elsewhere."""
    settled = continued(0, 3, is_complete=False, is_settled=True)
    assert reconcile([answer(9, 40)], [continued(0, 40), settled, continued(3, 40)]).num_exact == 1
    assert reconcile([answer(18, 80)], [continued(0, 40), continued(3, 40)]).num_exact == 1
