"""However TensorRT-LLM cuts an answer into iterations, its sequence is the same."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shard_server.engines.base import EngineRequest, Sampling, SequenceFinishReason
from shard_server.engines.tensorrt_llm.requests.request_stream import RequestStream
from tests.examples import num_examples
from tests.fakes.fake_tensorrt_llm.configs import SamplingParams
from tests.fakes.fake_tensorrt_llm.outputs import Aborter, Logprob, RequestOutput

tokens = st.lists(st.integers(1, 6), min_size=1, max_size=20)


@settings(max_examples=num_examples(200), deadline=None)
@given(
    generated=tokens,
    cuts=st.sets(st.integers(1, 19)),
    stops=st.frozensets(st.integers(1, 6), max_size=2),
    max_tokens=st.integers(1, 20),
    is_trimmed=st.booleans(),
)
def test_news_add_up_to_the_answer(
    generated: list[int], cuts: set[int], stops: frozenset[int], max_tokens: int, is_trimmed: bool
) -> None:
    """Every token once, each with its own logprob, none behind a stop token or beyond max_tokens; a final trim of
    what was delivered changes nothing."""
    output = RequestOutput(1, [1], SamplingParams(), Aborter(lambda _: None))
    asked = EngineRequest("a", [1], Sampling(num_logprobs=1), max_tokens, stops)
    stream = RequestStream(asked, output, 0.0)
    completion = output.outputs[0]
    wanted: list[int] = []
    for token in generated[:max_tokens]:
        wanted.append(token)
        if token in stops:
            break
    delivered: list[int] = []
    logprobs: list[float] = []
    end = None
    for cut in sorted({cut for cut in cuts if cut < len(generated)} | {len(generated)}):
        completion.token_ids = generated[:cut]
        completion.logprobs = [{token: Logprob(-float(at))} for at, token in enumerate(generated[:cut])]
        if cut == len(generated):
            output.finished = True
            completion.finish_reason = "stop" if generated[-1] in stops else "length"
            if is_trimmed and delivered:
                completion.token_ids = generated[: len(delivered)]
                wanted = wanted[: len(delivered)] if len(wanted) > len(delivered) else wanted
        delta = stream.take(output)
        delivered += delta.token_ids
        logprobs += [entry.logprob for entry in delta.logprobs]
        end = delta.end
        if end is not None:
            break
    assert delivered == wanted
    assert logprobs == [-float(at) for at in range(len(wanted))]
    assert end in (SequenceFinishReason.STOP, SequenceFinishReason.LENGTH)
    if delivered[-1] in stops:
        assert end is SequenceFinishReason.STOP
