"""Text that the core clears by the prefilter, without the safety service, is text that the service would clear."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloom.v1.safety_service_pb2 import PolicyState
from router.core.actions import Action, ScreenAnswers, SendStep, SubmitAttempt
from router.core.events import AnswerHalt, AnswersScreened, SafetyUp
from router.links.prefilter import Outgoing, Prefilter, PrefilteredAnswers
from safety_svc.policy import Phrase, RuleSet
from safety_svc.prefilter import answer_prefilter
from tests.examples import num_examples
from tests.fakes.core_rig import CoreRig, only
from tests.property.test_router_prefilter import RULE, Service, deltas_of, rule_sets, screen_fully

CLIENT_SLOT = 1


class CountingFilter(Prefilter):
    """Counts its searches."""

    num_searches = 0

    def is_suspicious(self, text: str) -> bool:
        self.num_searches += 1
        return super().is_suspicious(text)


class Gate:
    """A core with one gated answer, its safety link and the service behind it."""

    def __init__(self, rules: RuleSet, *, are_searched: bool = True) -> None:
        announced = answer_prefilter(rules)
        self.answers = PrefilteredAnswers(are_searched=are_searched)
        self.answers.prefilter = (
            CountingFilter.from_policy(PolicyState(answer_prefilter=announced)) if announced else None
        )
        self.service = Service(rules)
        self.rig = CoreRig(safety=None, max_uncleared_tokens=1000)
        self.rig.handle(SafetyUp(False, True, self.answers.prefilter))
        self.rig.add_shard(max_model_len=1000, num_blocks=1000)
        (choice,) = only(self.rig.submit(slots=[CLIENT_SLOT], max_tokens=500), SubmitAttempt).choices
        self.slot = choice.slot
        self.text = ""
        self.num_asked = 0

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendStep):
                self.text += "".join(action.step.deltas)
            if isinstance(action, ScreenAnswers):
                self._screen(action)

    def _screen(self, action: ScreenAnswers) -> None:
        """The service has one slot: the first slot of the core is the only one."""
        outgoing = Outgoing()
        renamed = [7] * len(action.slots)
        skips = [(7, num_chars, last) for _, num_chars, last in action.skips]
        known = self.answers.take(renamed, action.deltas, [7] * len(action.close_slots), outgoing, skips)
        core_slot = next(iter([*action.slots, *action.close_slots]))
        if outgoing:
            self.num_asked += 1
            response = self.service.answer(outgoing)
            self.answers.note(response)
            screener = self.service.screener
            assert screener is not None
            halts = [AnswerHalt(core_slot, screener.num_clear_chars, "No.")] if screener.hit is not None else []
            closed = [core_slot] * len(response.closed_slots)
            slots = [core_slot] * len(response.slots)
            self.take(self.rig.handle(AnswersScreened(slots, response.num_clear_chars[:], halts, closed)))
        if known is not None:
            slots, closed = [core_slot] * len(known.slots), [core_slot] * len(known.closed_slots)
            self.take(self.rig.handle(AnswersScreened(slots, known.num_clear_chars, [], closed)))


@settings(max_examples=num_examples(200), deadline=None)
@given(rule_sets(), deltas_of, st.booleans())
@example(RuleSet([Phrase(RULE, "a b", True)], []), ["xa", "  ", "b"], False)
@example(RuleSet([Phrase(RULE, "ab", False)], []), ["x", "a", "x", "ab"], True)
def test_the_core_shows_what_full_screening_shows(rules: RuleSet, deltas: list[str], in_pairs: bool) -> None:
    """After every token the client has as many whole deltas as the service would have cleared, and a halted answer ends
    at the same place, whether tokens come one by one or in pairs."""
    gate = Gate(rules)
    if in_pairs:
        deltas = ["".join(deltas[i : i + 2]) for i in range(0, len(deltas), 2)]
    history, fully_shown, is_halted = screen_fully(rules, deltas)
    whole = "".join(deltas)
    for number, delta in enumerate(deltas[: len(history)]):
        ids = [9] * (2 if in_pairs else 1)
        if number:
            gate.take(gate.rig.step("s0", (gate.slot, ids, delta)))
        elif in_pairs:
            gate.take(gate.rig.step("s0", (gate.slot, ids, delta), starts=[]))
        else:
            gate.take(gate.rig.start("s0", gate.slot, 9, delta))
        ends = [len("".join(deltas[:count])) for count in range(number + 2)]
        if not (is_halted and number == len(history) - 1):
            assert len(gate.text) == max(end for end in ends if end <= history[number])
    gate.take(gate.rig.finish("s0", gate.slot))
    assert gate.text == (whole[:fully_shown] if is_halted else whole)


def test_what_the_core_has_searched_is_not_searched_again() -> None:
    """A token in which something may begin costs a search, and another one in the link would find the same."""
    searches: dict[bool, int] = {}
    for are_searched in (True, False):
        gate = Gate(RuleSet([Phrase(RULE, "zebras", True)], []), are_searched=are_searched)
        gate.take(gate.rig.start("s0", gate.slot, 9, "some "))
        for _ in range(5):
            gate.take(gate.rig.step("s0", (gate.slot, [9], "zebra ")))
        assert isinstance(gate.answers.prefilter, CountingFilter)
        searches[are_searched] = gate.answers.prefilter.num_searches
        assert (gate.text, gate.num_asked) == ("some " + "zebra " * 5, 5)
    assert searches[True] < searches[False]


def test_plain_text_asks_the_service_nothing() -> None:
    """The purpose of the prefilter: an answer in which nothing forbidden can begin costs not one message."""
    gate = Gate(RuleSet([Phrase(RULE, "zz", True)], []))
    gate.take(gate.rig.start("s0", gate.slot, 9, "some "))
    for _ in range(5):
        gate.take(gate.rig.step("s0", (gate.slot, [9], "text ")))
    gate.take(gate.rig.finish("s0", gate.slot))
    assert gate.text == "some " + "text " * 5
    assert gate.num_asked == 0
