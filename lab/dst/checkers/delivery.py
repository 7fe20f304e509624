"""Checks what clients read: every token, all of the text, well-formed frames; also from the result cache."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason
from lab.dst import script
from lab.dst.checker import Checker
from lab.dst.nodes.router_node import content_of
from lab.dst.observed import ObservedChoice, ObservedRequest
from lab.dst.views import AnswerView, ClientStreamView, SimulatedRouterView
from router.core.actions import Action, RequestEnded, SendStep
from router.core.events import Event
from router.core.frames import Finish, Step


class TokensExact(Checker):
    """No token is delivered twice, skipped or changed: every entry continues the answer."""

    invariant = "tokens_exact"

    def on_client_delta(self, answer: AnswerView, token_ids: Sequence[int], delta: str) -> None:
        expected = script.answer(answer.script_key, answer.spec.index)
        end = answer.num_tokens + len(token_ids)
        if tuple(token_ids) != expected[answer.num_tokens : end]:
            self.fail(
                f"{answer.request.request_id}[{answer.spec.index}] got {list(token_ids)} after {answer.num_tokens} "
                f"tokens of {list(expected)}"
            )


class TextIntact(Checker):
    """No text is lost, doubled or changed, and a complete answer has all of it."""

    invariant = "text_intact"

    def on_client_delta(self, answer: AnswerView, token_ids: Sequence[int], delta: str) -> None:
        text = script.answer_text(answer.script_key, answer.spec.index)
        if not text.startswith(delta, answer.num_chars):
            self.fail(
                f"{answer.request.request_id}[{answer.spec.index}] got {delta!r} after {answer.num_chars} characters "
                f"of {text!r}"
            )

    def on_client_finish(self, answer: AnswerView, finish: Finish) -> None:
        if finish.reason not in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH):
            return
        tokens = script.answer(answer.script_key, answer.spec.index)[: answer.num_tokens]
        text = script.text_of(tokens)
        # The router, which has no detokenizer, ends an answer that is at its limit when its shard is lost or when the
        # answer is resumed. Text that the shard's detokenizer held back is then missing. With STOP none ever is.
        is_at_limit = finish.reason == FinishReason.FINISH_REASON_LENGTH
        least = len(script.text_shown(tokens, len(tokens))) if is_at_limit else len(text)
        if not least <= answer.num_chars <= len(text):
            self.fail(f"{answer.request.request_id} ended after {answer.num_chars} of {len(text)} characters")


class FramesWellFormed(Checker):
    """There is at most one frame per client and event, the arrays of a frame have matching lengths, a start precedes
    the first token, and every token has logprobs if they were requested."""

    invariant = "frames_well_formed"

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        sent = Counter(action.client_id for action in actions if isinstance(action, SendStep))
        if sent and max(sent.values()) > 1:
            self.fail(f"{node.name} sent {max(sent.values())} frames to one client for one event")

    def on_step(self, node: SimulatedRouterView, action: SendStep) -> None:
        self._check(action.step)

    def on_client_step(self, stream: ClientStreamView, step: Step) -> None:
        self._check(step)

    def on_client_delta(self, answer: AnswerView, token_ids: Sequence[int], delta: str) -> None:
        if token_ids and answer.num_starts != 1:
            self.fail(f"{answer.request.request_id} has tokens and {answer.num_starts} starts")

    def on_client_finish(self, answer: AnswerView, finish: Finish) -> None:
        is_error = finish.reason in (
            FinishReason.FINISH_REASON_ERROR,
            FinishReason.FINISH_REASON_CONTENT_FILTER,
        )
        if (finish.error is not None) != is_error:
            self.fail(f"{answer.request.request_id} ended with reason {finish.reason} and error {finish.error}")
        sampling = answer.request.sampling
        if isinstance(sampling, script.ScriptedSampling) and sampling.wants_logprobs:
            num_new_tokens = answer.num_tokens - len(answer.spec.output_token_ids)
            if answer.num_logprobs != num_new_tokens:
                self.fail(f"{answer.request.request_id} has {answer.num_logprobs} logprobs, {num_new_tokens} tokens")

    def _check(self, step: Step) -> None:
        counts = step.num_tokens or [1] * len(step.slots)
        if not step:
            self.fail("an empty frame was sent")
        if len(set(step.slots)) != len(step.slots) and not step.has_replay:
            self.fail(f"more than one entry for a slot: {step.slots}")
        if not len(counts) == len(step.slots) == len(step.deltas) or sum(counts) != len(step.token_ids):
            self.fail(f"arrays do not fit together: {step}")


class AnswersComplete(Checker):
    """`stop` means that the sequence is complete, `length` that it reached its limit."""

    invariant = "answers_complete"

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        request = choice.request.request
        assert isinstance(request.sampling, script.ScriptedSampling)
        whole = script.answer(request.sampling.script_key, choice.spec.index)
        num_tokens = len(choice.spec.output_token_ids) + choice.num_sent_tokens
        if finish.reason == FinishReason.FINISH_REASON_STOP and num_tokens != len(whole):
            self.fail(f"{request.request_id} stopped after {num_tokens} of {len(whole)} tokens")
        if finish.reason == FinishReason.FINISH_REASON_LENGTH:
            limit = request.max_tokens if choice.limit is None else choice.limit
            if num_tokens != limit:
                self.fail(f"{request.request_id} ended at length {num_tokens}, its limit was {limit}")


_COMPLETE: Final = (FINISH_REASON_STOP, FINISH_REASON_LENGTH)


class CachedAnswersOwn(Checker):
    """A tenant gets a cached answer only to what it has asked for itself, under the same policy, and only if it got the
    whole answer then."""

    invariant = "cached_answers_own"

    def __init__(self) -> None:
        self._answered: set[tuple[object, ...]] = set()

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is None or not observed.request.is_cacheable:
            if end.is_result_cache_hit:
                self.fail(f"{end.request_id} got a cached answer, which it may not have")
            return
        request = observed.request
        indexes = tuple(choice.spec.index for choice in observed.choices)
        asked = (node.name, request.tenant, observed.policy, indexes, *content_of(request))
        if end.is_result_cache_hit and asked not in self._answered:
            self.fail(f"{end.request_id} of {request.tenant} got an answer that was not given to it before")
        if end.reason in _COMPLETE:
            self._answered.add(asked)
