"""Validates `response_format` and `structured_outputs` and converts them to the fabric's Guide."""

from __future__ import annotations

import msgspec

from edge_http.formatting.body_guide import ALL_OUTPUT, GUIDED, BodyGuide
from edge_http.formatting.decoding import json_text
from edge_http.openai.requests import GenerationBody, ResponseFormat, StructuredOutputs
from kvloom.errors import invalid_argument
from kvloom.guide import check_guide
from kvloom.v1.generation_pb2 import Choices, Guide


def guide_of(body: GenerationBody) -> BodyGuide | None:
    """Return the guide that the body requests, or None. Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    found = _of_response_format(body.response_format) if body.response_format is not None else None
    if body.structured_outputs is not None:
        if found is not None:
            raise invalid_argument("Give either response_format or structured_outputs.", ALL_OUTPUT)
        found = _of_structured_outputs(body.structured_outputs)
    if body.guided_regex or body.guided_choice or body.guided_grammar or _is_given(body.guided_json):
        found = _of_predecessors(body, is_only=found is None)
    if found is not None:
        check_guide(found.guide, found.field)
    return found


def _of_response_format(wanted: ResponseFormat) -> BodyGuide | None:
    field = "response_format.json_schema"
    if wanted.type != "json_schema":
        if wanted.json_schema is not None:
            raise invalid_argument(f"{field} goes only with type: json_schema.", field)
        if wanted.type == "text":
            return None
        return BodyGuide(Guide(json_object=True), "response_format")
    if wanted.json_schema is None:
        raise invalid_argument(f"{field} is missing.", field)
    field += ".schema"
    if not _is_given(wanted.json_schema.schema):
        raise invalid_argument(f"{field} is missing.", field)
    return BodyGuide(Guide(json_schema=json_text(wanted.json_schema.schema, field)), field)


def _of_predecessors(body: GenerationBody, *, is_only: bool) -> BodyGuide:
    """Reads what older clients of vLLM say instead of `structured_outputs`."""
    names = [name for name in ("regex", "choice", "grammar") if getattr(body, GUIDED + name)]
    names += ["json"] if _is_given(body.guided_json) else []
    if not is_only or len(names) > 1:
        raise invalid_argument(f"{GUIDED}{names[-1]}: give one form of the answer only.", GUIDED + names[-1])
    wanted = StructuredOutputs(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    found = _of_structured_outputs(wanted)
    return BodyGuide(found.guide, found.field.replace(f"{ALL_OUTPUT}.", GUIDED))


def _of_structured_outputs(wanted: StructuredOutputs) -> BodyGuide:
    guides: dict[str, Guide] = {}
    if wanted.json_object:
        guides["json_object"] = Guide(json_object=True)
    if _is_given(wanted.json):
        guides["json"] = Guide(json_schema=_schema_text(wanted.json, f"{ALL_OUTPUT}.json"))
    if wanted.regex is not None:
        guides["regex"] = Guide(regex=wanted.regex)
    if wanted.choice is not None:
        guides["choice"] = Guide(choice=Choices(texts=wanted.choice))
    if wanted.grammar is not None:
        guides["grammar"] = Guide(grammar=wanted.grammar)
    if len(guides) != 1:
        raise invalid_argument(
            f"{ALL_OUTPUT} must hold exactly one form, got {', '.join(guides) or 'none'}.", ALL_OUTPUT
        )
    [(name, guide)] = guides.items()
    return BodyGuide(guide, f"{ALL_OUTPUT}.{name}")


def _is_given(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


def _schema_text(raw: msgspec.Raw, field: str) -> str:
    """Return the text of a schema, which is given as JSON or as a string that contains JSON."""
    text = json_text(raw, field)
    return msgspec.json.decode(text, type=str) if text.startswith('"') else text
