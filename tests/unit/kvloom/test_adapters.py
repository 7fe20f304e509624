"""By which names adapters can be requested."""

from __future__ import annotations

from kvloom.adapters import Adapter, adapter_names, unknown_name
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.served_model import ServedModel
from tests.fakes.tiny_tokenizer import model_tokenizer


def catalogue_of(*models: ServedModel, **adapters: dict[str, str]) -> Catalogue:
    catalogue = Catalogue(models)
    catalogue.set_adapters(adapters)
    return catalogue


def model(name: str, *aliases: str) -> ServedModel:
    return ServedModel(name, model_tokenizer(), aliases=aliases)


def test_an_own_name_is_enough_while_only_one_model_has_it() -> None:
    """Clients of vLLM know no other; with two models, a guess would answer with the wrong one."""
    assert adapter_names({"m": ["x", "y"], "n": ["y"]}) == {
        "m:x": ("m", "x"),
        "m:y": ("m", "y"),
        "n:y": ("n", "y"),
        "x": ("m", "x"),
    }


def test_models_and_aliases_have_precedence_over_adapters() -> None:
    """An adapter that is registered at run time must take no name away from a model that is served."""
    catalogue = catalogue_of(model("m", "alias", "m:x"), model("n"), m={"x": "1", "n": "1", "alias": "1"})
    assert catalogue.by_name["n"].adapter is None
    assert catalogue.by_name["alias"].adapter is None
    assert catalogue.by_name["m:x"].adapter is None
    assert catalogue.by_name["x"].adapter == Adapter("x", "1")
    assert catalogue.by_name["m:n"].adapter == Adapter("n", "1")
    assert catalogue.by_name["alias:n"].base_name == "m"
    assert catalogue.by_name["alias:n"].name == "m:n"


def test_adapters_come_change_and_go() -> None:
    """A request gets the adapter that now has the name; the model itself stays as it is."""
    catalogue = catalogue_of(served := model("m"), m={"x": "1"})
    assert catalogue.by_name["m:x"].tokenizer is served.tokenizer
    catalogue.set_adapters({"m": {"x": "2"}})
    assert catalogue.by_name["m:x"].adapter == Adapter("x", "2")
    catalogue.set_adapters({})
    assert catalogue.by_name == {"m": served}


def test_adapters_of_models_without_a_card_are_found() -> None:
    """A router serves such models too: their prompts come as tokens."""
    catalogue = catalogue_of(other={"x": "1"})
    assert not catalogue.by_name
    assert catalogue.adapter_named("other:x") == catalogue.adapter_named("x") == ("other", Adapter("x", "1"))
    assert catalogue.adapter_named("other") is None


def test_the_error_says_what_to_write() -> None:
    """A 404 for a name with a typing error names those that exist."""
    adapters = {"m": ["x", "y"], "m:b": [], "n": ["x"]}
    assert unknown_name("m:z", adapters) == "The model 'm' has no adapter 'z'; it has x, y."
    assert unknown_name("m:b:z", adapters) == "The model 'm:b' has no adapter 'z'; it has none."
    assert unknown_name("x", adapters) == "Several models have an adapter 'x': name one of m:x, n:x."
    assert unknown_name("q" * 200, adapters) == f"The model '{'q' * 128}…' does not exist."
