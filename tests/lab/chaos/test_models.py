"""`kvloom-lab chaos` with several models: whose answer is whose, and what a model that is away explains."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kvloom_common.config import ModelConfig
from lab.chaos.checking.absences import absence_problems
from lab.chaos.checking.explanations import FleetSize, is_explained
from lab.chaos.checking.verdicts import AnswerVerdict, Finding
from lab.chaos.clients.oracle import SimOracle
from lab.chaos.clients.questions import Behaviour, Endpoint, Question, UserCall
from lab.chaos.clients.transcript import AnswerEnd, Transcript
from lab.chaos.command import chaos
from lab.chaos.fabric.faults import Disturbance, FaultKind, Probe
from lab.chaos.run import ChaosPlan
from tests.fakes.tiny_tokenizer import model_tokenizer

MODELS = {"shard-a-0": "a", "shard-a-1": "a", "shard-b-0": "b", "shard-b-1": "b"}
FLEET = FleetSize(num_edges=2, num_routers=2, num_shards=2, max_attempts=3, model_of=MODELS)
UNLOAD, SLEEP, KILL = FaultKind.UNLOAD_MODEL, FaultKind.SLEEP_MODEL, FaultKind.KILL_SHARD


def explained(model: str, code: str, *struck: tuple[FaultKind, str], first_at: float | None = None) -> bool:
    question = Question("Tell me about tea.", True, 10, 1.0, seed=1, model=model)
    transcript = Transcript.begin(1, now=100.0)
    transcript.end, transcript.code, transcript.ended_at, transcript.first_at = AnswerEnd.ERROR, code, 105.0, first_at
    disturbances = [Disturbance(kind, target, 101.0, 102.0) for kind, target in struck]
    call = UserCall(question, Endpoint.CHAT, Behaviour.PLAIN)
    return is_explained(call, transcript, Finding(AnswerVerdict.FAILED), disturbances, FLEET)


def test_a_model_that_is_away_explains_refusals_of_its_own_requests_only() -> None:
    """Requests for other models notice nothing, and an answer that runs is never broken by an unload or a sleep."""
    for kind, code in ((UNLOAD, "model_not_found"), (SLEEP, "no_shard_ready")):
        assert explained("a", code, (kind, "a"))
        assert not explained("b", code, (kind, "a"))
        assert not explained("a", code, (kind, "a"), first_at=101.0)
        assert not explained("a", "shard_lost", (kind, "a"))
    assert not explained("a", "model_not_found", (SLEEP, "a"))


def test_the_shards_of_another_model_explain_nothing() -> None:
    """They could not have taken the request."""
    assert explained("a", "shard_lost", (KILL, "shard-a-0"), (KILL, "shard-a-1"))
    assert not explained("a", "shard_lost", (KILL, "shard-a-0"), (KILL, "shard-b-1"))
    assert not explained("a", "shard_lost", (KILL, "shard-b-0"), (KILL, "shard-b-1"))


async def test_models_answer_the_same_question_differently() -> None:
    """Otherwise an answer of the wrong model would pass."""
    oracle = SimOracle(model_tokenizer(), {"a": 0, "b": 1})
    a, b = [
        await oracle.expected(Question("Tell me about tea.", False, 20, 1.0, seed=1, model=model)) for model in "ab"
    ]
    assert a.num_prompt_tokens == b.num_prompt_tokens
    assert sum(x == y for x, y in zip(a.choices[0].token_ids, b.choices[0].token_ids, strict=True)) < 3


def test_requests_for_a_model_that_is_away_must_be_refused_as_documented() -> None:
    """A router that lets them wait, or another model that answers them, is a bug, unless another fault strikes."""

    def problems(answer: str, *others: Disturbance) -> list[str]:
        own = Disturbance(UNLOAD, "a", 100.0, 110.0)
        return absence_problems([Probe(UNLOAD, "a", 104.0, 104.1, answer)], [own, *others], begin=100.0)

    assert not problems("404 model_not_found")
    (problem,) = problems("200")
    assert "at 4.0 s, a being away by unload-model: answered 200" in problem
    assert not problems("no answer", Disturbance(FaultKind.KILL_EDGE, "edge-0", 104.0, 105.0))
    assert problems("no answer", Disturbance(FaultKind.KILL_EDGE, "edge-0", 105.0, 106.0))


def test_the_fabric_of_a_plan_has_its_models_with_answers_of_their_own() -> None:
    """The oracle computes what these shards answer."""
    plan = ChaosPlan(ModelConfig(name="m", path="p"), minutes=1, seed=0, kinds=[UNLOAD], num_models=3, num_shards=2)
    config = plan.config()
    assert [(model.name, model.path) for model in config.models] == [("m", "p"), ("m-2", "p"), ("m-3", "p")]
    assert [model.shard.get("sim", {}).get("answer_seed", 0) for model in config.models] == [0, 1, 2]
    assert plan.fleet.model_of["shard-m-3-1"] == "m-3"
    assert len(plan.fleet.model_of) == 6


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--faults", "unload-model"), "unload-model needs --models 2"),
        (("--models", "2", "--engine", "torch"), "only with --engine sim"),
    ],
)
def test_what_needs_several_models_says_so(arguments: tuple[str, ...], problem: str) -> None:
    """A run that silently leaves a fault out, or cannot tell models apart, proves nothing."""
    done = CliRunner().invoke(chaos, arguments)
    assert done.exit_code == 2
    assert problem in done.output
