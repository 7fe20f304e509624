"""Which model takes a `Generate` that names a route."""

from __future__ import annotations

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import Pooling, StopConditions
from kvloom.v1.router_service_pb2 import Conversation, GenerateRequest, Message
from kvloom_common.config import CascadeConfig, RouteConfig, RouteRule
from kvloom_common.models.model_routes import ModelRoutes
from router.model_choice import choose_model
from tests.fakes.served_models import tiny_model

MODELS = {name: tiny_model(name) for name in ("small", "large", "largest")}


def chosen(routes: ModelRoutes, request: GenerateRequest, ready: set[str] | None = None) -> tuple[str, str]:
    found = choose_model(request, MODELS, routes, (ready or set(MODELS)).__contains__, "caller")
    assert found.model is not None
    assert found.chosen is not None
    return found.model.name, found.chosen.how


def test_no_answer_is_streamed_that_a_cascade_would_judge_first() -> None:
    """A caller of gRPC must not get what the route's tests are there to discard."""
    cascade = CascadeConfig(escalate_on=["refusal"])
    routes = ModelRoutes([RouteConfig(name="r", targets=["small"], fallback=["large"], cascade=cascade)])
    request = GenerateRequest(model="r", models=["largest"], text="hello")
    assert chosen(routes, request) == ("large", "r;target=large")
    assert chosen(routes, request, {"small", "largest"}) == ("largest", "r;target=large")


def test_rules_read_what_the_user_wrote_and_how_long_the_answer_may_be() -> None:
    """A rule must mean the same at every entrance."""
    rules = [RouteRule(languages=["de"], targets=["large"]), RouteRule(min_context_tokens=900, targets=["largest"])]
    routes = ModelRoutes([RouteConfig(name="r", targets=["small"], rules=rules)])
    messages = [Message(role="user", content="Was ist das?"), Message(role="assistant", content="What is it?")]
    conversation = Conversation(messages=messages)
    assert chosen(routes, GenerateRequest(model="r", conversation=conversation))[0] == "large"
    assert chosen(routes, GenerateRequest(model="r", text="Was ist das?"))[0] == "large"
    stop = StopConditions(max_tokens=900)
    assert chosen(routes, GenerateRequest(model="r", text="What is it?", stop=stop))[0] == "largest"
    assert chosen(routes, GenerateRequest(model="r", text="What is it?"))[0] == "small"


def test_embeddings_of_different_models_are_not_mixed() -> None:
    """The same as over HTTP."""
    routes = ModelRoutes([RouteConfig(name="r", targets=["small"], fallback=["large"])])
    embedding = GenerateRequest(model="r", text="hello", pooling=Pooling())
    with pytest.raises(KvloomError, match="cannot be compared"):
        chosen(routes, embedding)
    listed = GenerateRequest(model="small", models=["large"], text="hello", pooling=Pooling())
    assert chosen(routes, listed, {"large"})[0] == "large"


def test_a_model_in_a_brownout_is_passed_while_another_is_ready() -> None:
    """Over gRPC the router chooses itself. Without another ready model the overloaded one is still better than none."""
    routes = ModelRoutes([RouteConfig(name="r", targets=["large"], fallback=["small"])])
    request = GenerateRequest(model="r", text="hello")

    def model_of(ready: set[str]) -> str | None:
        found = choose_model(request, MODELS, routes, ready.__contains__, "caller", None, "large".__eq__)
        return None if found.model is None else found.model.name

    assert model_of({"large", "small"}) == "small"
    assert model_of({"large"}) == "large"
