"""The tokens whose log-probabilities an answer shows have its text, wherever a stop string cuts it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_http.answers.joined_logprobs import JoinedLogprobs
from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from tests.fakes.tiny_tokenizer import model_tokenizer

TOKENIZER = model_tokenizer()
TEXTS = st.lists(
    st.sampled_from(["the ", "fox", " jumps", "é", "日本", "\n\n", "x", "<", "END", "ab", "aab"]), max_size=12
)


@given(
    TEXTS,
    st.lists(st.sampled_from(["\n\n", "END", "x", "abc", "aab", "本", "s é", "fox jumps"]), max_size=3),
    st.data(),
)
def test_the_shown_tokens_have_the_text(pieces: list[str], stops: list[str], data: st.DataObject) -> None:
    """As the shard sends them: nothing after the token that completes a stop string, text held back as long as it may
    begin one, any number of tokens at a time."""
    token_ids = TOKENIZER.encode_now("".join(pieces))
    shard = IncrementalDetokenizer(TOKENIZER, stops)
    joined = JoinedLogprobs(TOKENIZER)
    shown, text = b"", ""
    at = 0

    def show(ids: object, entries: object, num_cut_bytes: int = 0) -> None:
        nonlocal shown
        assert list(ids) == [round(entry.logprob) for entry in entries]
        bytes_ = b"".join(TOKENIZER.shown_bytes(one) for one in ids)
        shown += bytes_[: len(bytes_) - num_cut_bytes]

    while at < len(token_ids) and shard.stop_string is None:
        count, delta, sent = data.draw(st.integers(1, 3)), "", []
        for token_id in token_ids[at : at + count]:
            delta += shard.push((token_id,))
            sent.append(token_id)
            if shard.stop_string is not None:
                break
        at += count
        text += delta
        show(*joined.push(delta, sent, [TokenLogprobs(logprob=one) for one in sent]))
        assert text.encode().startswith(shown)  # none before its text
    text += shard.flush()
    show(*joined.finish(is_cut=shard.stop_string is not None))
    assert shown.decode() == text
