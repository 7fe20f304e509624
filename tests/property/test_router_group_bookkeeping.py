"""A request's record of its answer under arbitrary frames, losses and rejections: no token is lost or doubled."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.errors import KvloomError
from kvloom.router_link.link import LinkRequest
from kvloom.router_link.tracked_request import LOSSES, REFUSALS, TrackedRequest
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from tests.examples import num_examples
from tests.fakes.link_requests import link_request

PIECES = ("a", "", "ß", "👩‍💻", "\ufffd", "stop")
PROMPT = [1, 2, 3]


def token_of(index: int, position: int) -> int:
    return 1000 * index + position


def text_of(index: int, position: int) -> str:
    return PIECES[(3 * index + position) % len(PIECES)]


class Heard:
    """The caller's sink."""

    def __init__(self, n: int) -> None:
        self.num_starts = [0] * n
        self.ids: list[list[int]] = [[] for _ in range(n)]
        self.texts = [""] * n
        self.logprobs: list[list[float]] = [[] for _ in range(n)]
        self.finishes: list[generation_pb2.SequenceFinish | None] = [None] * n

    def on_start(self, index: int, start: generation_pb2.SequenceStart) -> None:
        assert not self.ids[index]
        assert start.num_cached_tokens == 7, "not the first attempt's"
        self.num_starts[index] += 1

    def on_tokens(
        self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[generation_pb2.TokenLogprobs]
    ) -> None:
        assert self.finishes[index] is None
        self.ids[index] += token_ids
        self.texts[index] += delta
        self.logprobs[index] += [entry.logprob for entry in logprobs]

    def on_finish(self, index: int, finish: generation_pb2.SequenceFinish) -> None:
        assert self.finishes[index] is None
        self.finishes[index] = finish

    def check(self, index: int, length: int) -> None:
        """Whether it equals the undisturbed answer."""
        assert self.num_starts[index] == 1
        assert self.ids[index] == [token_of(index, i) for i in range(length)]
        assert self.texts[index] == "".join(text_of(index, i) for i in range(length))
        assert self.logprobs[index] == [-float(i) for i in range(length)]
        finish = self.finishes[index]
        assert finish is not None
        assert finish.reason == generation_pb2.FINISH_REASON_STOP
        assert (finish.num_prompt_tokens, finish.num_cached_tokens) == (len(PROMPT), 7)
        assert finish.num_output_tokens == length


class Group:
    """The owner, which counts the calls that it gets."""

    def __init__(self) -> None:
        self.time = 0.0
        self.num_lost = 0
        self.num_over = 0

    def now(self) -> float:
        return self.time

    def on_lost(self, tracked: TrackedRequest) -> None:
        self.num_lost += 1

    def on_over(self, tracked: TrackedRequest) -> None:
        tracked.is_over = True
        self.num_over += 1


class ScriptedRouter:
    """A router that answers `request` in frames as a test draws them."""

    def __init__(self, request: LinkRequest, lengths: Sequence[int]) -> None:
        if request.partial_choices:
            self.positions = {choice.index: len(choice.token_ids) for choice in request.partial_choices}
            for choice in request.partial_choices:
                assert list(choice.token_ids) == [token_of(choice.index, i) for i in range(len(choice.token_ids))]
                delivered = "".join(text_of(choice.index, i) for i in range(len(choice.token_ids)))
                assert choice.num_chars == len(delivered)
        else:
            self.positions = dict.fromkeys(range(request.n), 0)
        self.lengths = lengths
        self.num_cached: dict[int, int] = {}
        """The choices that have started in this assignment."""

    def play(self, tracked: TrackedRequest, heard: Heard, frames: Frames) -> None:
        for pick, count in frames:
            if not self.positions:
                return
            index = sorted(self.positions)[pick % len(self.positions)]
            # What was cached counts in the assignment in which the choice starts.
            self.send(tracked, index, count, 3 if heard.num_starts[index] else 7)

    def send(self, tracked: TrackedRequest, index: int, count: int, num_cached_tokens: int) -> None:
        """Delivers the next `count` tokens, and the finish with the last one."""
        if index not in self.num_cached:
            self.num_cached[index] = num_cached_tokens
            tracked.on_start(index, generation_pb2.SequenceStart(num_cached_tokens=num_cached_tokens))
        position = self.positions[index]
        end = min(position + count, self.lengths[index])
        places = range(position, end)
        tracked.on_tokens(
            index,
            "".join(text_of(index, i) for i in places),
            [token_of(index, i) for i in places],
            [generation_pb2.TokenLogprobs(logprob=-i) for i in places],
        )
        self.positions[index] = end
        if end == self.lengths[index]:
            del self.positions[index]
            finish = generation_pb2.SequenceFinish(
                reason=generation_pb2.FINISH_REASON_STOP,
                num_prompt_tokens=len(PROMPT),
                num_cached_tokens=self.num_cached[index],
                num_output_tokens=end,
            )
            tracked.on_finish(index, finish)

    def end(self, tracked: TrackedRequest, reason: ErrorReason.ValueType) -> None:
        error = KvloomError(reason, "lost").to_proto()
        for index in list(self.positions):
            finish = generation_pb2.SequenceFinish(reason=generation_pb2.FINISH_REASON_ERROR, error=error)
            tracked.on_finish(index, finish)
        self.positions.clear()


Frames = list[tuple[int, int]]
"""The (open choice, number of tokens) of each frame."""

frames = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=8)
losses = st.sampled_from(sorted(LOSSES))
disturbances = st.lists(
    st.one_of(st.tuples(frames, losses), st.tuples(st.just(None), st.sampled_from(sorted(REFUSALS)))), max_size=8
)


@settings(max_examples=num_examples(200), deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), disturbed=disturbances)
def test_any_losses_leave_the_undisturbed_answer(
    lengths: list[int], disturbed: list[tuple[Frames | None, ErrorReason.ValueType]]
) -> None:
    """Each choice gets one start, its own tokens once and in order, and one finish that counts them all once."""
    n = len(lengths)
    heard, group = Heard(n), Group()
    sampling, stop = generation_pb2.SamplingParams(seed=1), generation_pb2.StopConditions()
    tracked = TrackedRequest(1, link_request("r", "m", PROMPT, "", sampling, stop, n=n), heard, group, b"")
    num_moves = 0
    for sent, reason in disturbed:
        if sent is None and not num_moves:
            continue  # a request that its first router rejects is not retried
        router = ScriptedRouter(tracked.next_request(), lengths)
        tracked.on_submitted("link")
        group.time += 0.001 if sent is None else 10.0
        router.play(tracked, heard, sent or [])
        if tracked.is_over:
            break
        router.end(tracked, reason)
        num_moves += 1
    if not tracked.is_over:
        router = ScriptedRouter(tracked.next_request(), lengths)
        tracked.on_submitted("link")
        router.play(tracked, heard, [(0, 5)] * 50)
    assert (group.num_over, group.num_lost) == (1, num_moves)
    for index, length in enumerate(lengths):
        heard.check(index, length)
