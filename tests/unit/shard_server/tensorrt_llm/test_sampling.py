"""An EngineRequest as TensorRT-LLM's sampling parameters: each trap of theirs, once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from shard_server.engines.base import Capability, EngineError, EngineInfo, EngineRequest, Guide, GuideKind, Sampling
from shard_server.engines.tensorrt_llm.api import load_tensorrt_llm
from shard_server.engines.tensorrt_llm.requests.request_fields import cache_salt_of, check_request
from shard_server.engines.tensorrt_llm.requests.sampling_params import SamplingMapper, sampling_arguments
from tests.fakes.fake_tensorrt_llm import installed_tensorrt_llm

INFO = EngineInfo(
    engine="tensorrt_llm",
    model="model",
    block_size=16,
    num_blocks=64,
    max_batch=4,
    max_model_len=256,
    vocab_size=1000,
    eos_token_ids=frozenset({2, 3}),
    capabilities=frozenset(Capability),
)


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    with installed_tensorrt_llm():
        yield


def request(sampling: Sampling | None = None, max_tokens: int = 20, **fields: Any) -> EngineRequest:
    return EngineRequest("a", [5, 6, 7], sampling or Sampling(seed=11), max_tokens, **fields)


LOGITS_WIDTH = 1024
"""Larger than the tokenizer's vocabulary, as in Qwen2.5."""


def params_of(asked: EngineRequest, backend: str = "") -> Any:
    return SamplingMapper.of(load_tensorrt_llm(), backend, LOGITS_WIDTH).params_of(asked, INFO)


def test_greedy_is_the_absence_of_the_sampling_parameters():
    """temperature=0 is not greedy in every version."""
    params = params_of(request(Sampling(temperature=0.0, top_p=0.5, top_k=3)))
    assert (params.temperature, params.top_p, params.top_k) == (None, None, None)


def test_drawing_at_the_defaults_is_not_greedy():
    """All three absent would mean greedy."""
    params = params_of(request(Sampling(seed=2**64 - 1)))
    assert not params.is_greedy
    assert params.top_k is None, "0 would not be 'all' everywhere"
    assert 0 <= params.seed < 2**63


def test_one_end_id_and_the_other_ends_as_stop_tokens():
    """Without a tokenizer the library ends at `end_id` only."""
    params = params_of(request(stop_token_ids=frozenset({2, 3, 50})))
    assert params.end_id == 2
    assert params.stop_token_ids == [3, 50]
    assert not params.ignore_eos


def test_who_ignores_the_end_is_not_stopped_by_it():
    """`ignore_eos` would drop the stop tokens in newer versions."""
    params = params_of(request(stop_token_ids=frozenset({50})))
    assert not params.ignore_eos
    assert (params.end_id, params.pad_id) == (-1, 2)
    assert params.stop_token_ids == [50]
    assert params_of(request()).stop_token_ids is None


def test_the_stop_token_is_not_taken_back():
    """It was streamed already, and counts as output."""
    assert params_of(request()).include_stop_str_in_output


def test_max_tokens_is_what_an_earlier_attempt_left():
    """The library's own default would be 32."""
    assert params_of(request(max_tokens=20, output_token_ids=[1, 2, 3])).max_tokens == 17


@pytest.mark.parametrize(("asked", "given"), [(None, None), (0, 1), (1, 1), (5, 5)])
def test_logprobs_are_never_zero(asked: int | None, given: int | None):
    """0 turns them off in some versions."""
    assert params_of(request(Sampling(num_logprobs=asked))).logprobs == given


def test_penalties_leave_the_prompt_out_where_the_version_can():
    """OpenAI's look at the output only; what an earlier attempt emitted is output."""
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=-0.5)
    assert "prompt_ignore_length" not in sampling_arguments(request(sampling), INFO)
    params = params_of(request(sampling, output_token_ids=[9]))
    assert params.prompt_ignore_length == 3
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)


def test_further_parameters_are_mapped():
    """min_tokens is what an earlier attempt left of it; a bias is a tensor over the vocabulary."""
    pytest.importorskip("torch")
    sampling = Sampling(min_p=0.1, repetition_penalty=1.2, logit_bias=((7, -100.0), (9, 2.0)))
    params = params_of(request(sampling, min_tokens=5, output_token_ids=[1, 2]))
    assert (params.min_p, params.repetition_penalty, params.min_tokens) == (0.1, 1.2, 3)
    assert params.embedding_bias.shape == (LOGITS_WIDTH,)
    assert {i: v for i, v in enumerate(params.embedding_bias.tolist()) if v} == {7: -100.0, 9: 2.0}
    plain = params_of(request())
    assert (plain.min_p, plain.repetition_penalty, plain.min_tokens, plain.embedding_bias) == (None,) * 4


def guided(kind: GuideKind, text: str, **fields: Any) -> EngineRequest:
    return request(guide=Guide(kind, text), **fields)


def test_a_guide_without_a_backend_is_refused():
    """TensorRT-LLM ignores it without a word, and the client gets unguided text."""
    with pytest.raises(EngineError, match="guided_decoding_backend"):
        params_of(guided(GuideKind.REGEX, "a+"))


def test_guides_are_mapped():
    """A choice is a regular expression of literal texts."""
    assert params_of(guided(GuideKind.JSON_SCHEMA, "{}"), "llguidance").guided_decoding.json == "{}"
    assert params_of(guided(GuideKind.REGEX, "a+"), "llguidance").guided_decoding.regex == "a+"
    choice = json.dumps(["yes", "a.b|c"])
    assert params_of(guided(GuideKind.CHOICE, choice), "llguidance").guided_decoding.regex == r"(yes|a\.b\|c)"
    assert params_of(request(), "xgrammar").guided_decoding is None


@pytest.mark.parametrize(
    ("kind", "text", "field", "salted"),
    [
        (GuideKind.JSON_SCHEMA, ' {"type": "object"}', "json", '{"$comment": "0000000000000001", "type": "object"}'),
        (GuideKind.JSON_SCHEMA, "{ }", "json", '{"$comment": "0000000000000001" }'),
        (GuideKind.JSON_SCHEMA, "true", "json", "true"),
        (GuideKind.REGEX, "a|b", "regex", "(?<aaaaaaaaaaaaaaab>a|b)"),
        (GuideKind.CHOICE, '["a", "b."]', "regex", r"(?<aaaaaaaaaaaaaaab>a|b\.)"),
    ],
)
def test_tenants_share_no_compiled_guide(kind: GuideKind, text: str, field: str, salted: str):
    """XGrammar keeps compiled guides by their text: the time would tell what another tenant has sent."""
    assert getattr(params_of(guided(kind, text, root_hash=1), "xgrammar").guided_decoding, field) == salted
    other = getattr(params_of(guided(kind, text, root_hash=2), "xgrammar").guided_decoding, field)
    assert other != salted or text == "true"


def test_a_grammar_goes_only_to_the_backend_that_reads_its_syntax():
    """xgrammar would read Lark as EBNF."""
    grammar = guided(GuideKind.GRAMMAR, 'start: "a"')
    assert params_of(grammar, "llguidance").guided_decoding.grammar == 'start: "a"'
    with pytest.raises(EngineError, match="Lark"):
        params_of(grammar, "xgrammar")


def test_structural_tags_take_the_form_of_xgrammar():
    """Strict tools are guided where the library can, and refused where it would read something else."""
    tags = {"tags": [{"begin": "<a>", "json_schema": '{"type": "object"}', "end": "</a>"}], "triggers": ["<a>"]}
    guide = guided(GuideKind.STRUCTURAL_TAGS, json.dumps(tags))
    form = json.loads(params_of(guide, "xgrammar").guided_decoding.structural_tag)["format"]
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<a>"])
    [tag] = form["tags"]
    assert (tag["begin"], tag["end"], tag["content"]["json_schema"]["type"]) == ("<a>", "</a>", "object")
    other = dataclasses.replace(guide, root_hash=1)
    assert params_of(other, "xgrammar").guided_decoding.structural_tag != json.dumps(form)
    with pytest.raises(EngineError, match="xgrammar"):
        params_of(guide, "llguidance")


def test_a_guided_answer_is_not_resumed():
    """The library's matcher would start over in the middle of the answer."""
    with pytest.raises(EngineError, match="begun elsewhere"):
        params_of(guided(GuideKind.REGEX, "a+", output_token_ids=[1]), "xgrammar")


def test_the_salt_separates_what_the_root_hash_separates():
    """Tenants, models and adapters never share blocks."""
    assert cache_salt_of(request(root_hash=1)) != cache_salt_of(request(root_hash=2))
    assert int(cache_salt_of(request(root_hash=2**64 - 1)), 16) == 2**64 - 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 254}, "window"),
        ({"max_tokens": 2, "output_token_ids": [1, 2]}, "output tokens"),
        ({"output_token_ids": [1000]}, "vocabulary"),
    ],
)
def test_what_can_never_run_is_refused_before_the_library_sees_it(bad: dict[str, Any], message: str):
    """Some of it would take the engine down."""
    with pytest.raises(EngineError, match=message):
        check_request(request(**bad), INFO)


def test_penalties_that_the_sampler_ignores_are_refused():
    """An answer that silently lacks what was asked for is worse than an error."""
    without = dataclasses.replace(INFO, capabilities=frozenset())
    with pytest.raises(EngineError, match="penalties"):
        check_request(request(Sampling(presence_penalty=1.0)), without)
    for name, asked in {
        "min_p": request(Sampling(min_p=0.1)),
        "repetition_penalty": request(Sampling(repetition_penalty=1.1)),
        "logit_bias": request(Sampling(logit_bias=((1, 1.0),))),
        "min_tokens": request(min_tokens=2),
    }.items():
        with pytest.raises(EngineError, match=name):
            check_request(asked, without)
