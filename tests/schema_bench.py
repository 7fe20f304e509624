"""How much of the JSON-Schema-Test-Suite guides accept and honour: `python -m tests.schema_bench [FOLDER]`.

FOLDER has the suite's `*.json` of one draft; without it, that of draft 2020-12 is taken from the source distribution of
the package `jsonschema`, which pip downloads. A schema is *accepted* if it is compiled, and *honoured* if no instance
that the suite calls invalid can be written under its guide. It is *useful* if one that the suite calls valid can be.
A guide may be narrower than its schema: objects have only the properties that their schema names, numbers a bounded
number of digits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from kvloom_common.json_schema.bounded import bounded
from kvloom_common.json_schema.simplify import UnfollowableSchema, simplified

PACKAGE: Final = "jsonschema==4.26.0"
DRAFT: Final = "draft2020-12"
_TOKENIZER: Final = LLTokenizer("byte")
_WHITESPACE: Final = r"\n {0,32}| "
_VLLM_FORMATS: Final = {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"} | {
    "uri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
}

Guide = Callable[[Any], Any]
"""From a schema to the one that the compiler gets; None if it is refused."""


class Group(NamedTuple):
    """A schema of the suite, with its instances."""

    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


class Shares(NamedTuple):
    """How many schemas."""

    accepted: int
    honoured: int
    useful: int
    """Honoured ones under which a valid instance can be written, of those that have one."""


def groups(folder: Path) -> Iterator[Group]:
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            valid = [test["data"] for test in group["tests"] if test["valid"]]
            invalid = [test["data"] for test in group["tests"] if not test["valid"]]
            yield Group(f"{file.stem}: {group['description']}", group["schema"], valid, invalid)


def shares(suite: list[Group], guide: Guide) -> Shares:
    accepted = honoured = useful = 0
    for group in suite:
        schema = guide(group.schema)
        matcher = None if schema is None else _matcher(schema)
        if matcher is None:
            continue
        accepted += 1
        if not any(_writes(matcher, instance) for instance in group.invalid):
            honoured += 1
            useful += not group.valid or any(_writes(matcher, instance) for instance in group.valid)
    return Shares(accepted, honoured, useful)


def followed(schema: Any) -> Any:
    """As of `response_format` and strict tools."""
    try:
        return bounded(simplified(schema).whole())
    except UnfollowableSchema:
        return None


def relaxed(schema: Any) -> Any:
    """As of a tool that is not strict, whose arguments are an object."""
    return bounded(simplified(schema, is_lenient=True, of_arguments=True).whole())


def as_given(schema: Any) -> Any:
    """llguidance alone."""
    return {} if schema is True else {"not": {}} if schema is False else schema


def passes_vllm(schema: Any) -> bool:
    """By the keywords for which vLLM 0.28 does not give a schema to XGrammar."""
    if isinstance(schema, list):
        return all(map(passes_vllm, schema))
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type")
    bad = (
        (kind in ("integer", "number") and "multipleOf" in schema)
        or (kind == "array" and not {"uniqueItems", "contains", "minContains", "maxContains"}.isdisjoint(schema))
        or (kind == "string" and "format" in schema and schema["format"] not in _VLLM_FORMATS)
        or (kind == "object" and not {"patternProperties", "propertyNames"}.isdisjoint(schema))
    )
    return not bad and all(map(passes_vllm, schema.values()))


def _matcher(schema: Any) -> LLMatcher | None:
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False), defaults={"whitespace_pattern": _WHITESPACE}
        )
    except ValueError:
        return None
    matcher = LLMatcher(_TOKENIZER, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return None if matcher.is_error() else matcher


def _writes(matcher: LLMatcher, instance: Any) -> bool:
    text = list(json.dumps(instance, ensure_ascii=False).encode())
    found = matcher.deep_copy()
    return found.try_consume_tokens(text) == len(text) and found.is_accepting()


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema", PACKAGE]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    [archive] = folder.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return next(folder.glob(f"jsonschema-*/json/tests/{DRAFT}"))


def report(suite: list[Group]) -> Iterator[str]:
    """The lines of the report, in Markdown."""
    yield f"{len(suite)} schemas\n"
    yield "| guide | accepted | honoured, of the accepted | useful, of the honoured |\n|---|---|---|---|"
    objects = [group for group in suite if any(isinstance(each, dict) for each in group.valid)]
    for name, guide, of in (
        ("`response_format`, strict tools", followed, suite),
        ("tools that are not strict, of the schemas with valid objects", relaxed, objects),
        ("llguidance alone", as_given, suite),
    ):
        found = shares(of, guide)
        honoured = _share(found.honoured, found.accepted)
        yield f"| {name} | {_share(found.accepted, len(of))} | {honoured} | {_share(found.useful, found.honoured)} |"
    yield f"\nvLLM's rule for XGrammar passes {_share(sum(passes_vllm(group.schema) for group in suite), len(suite))}."


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else _downloaded(Path(temporary))
        suite = list(groups(folder))
    sys.stdout.writelines(f"{line}\n" for line in report(suite))


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f}%)"


if __name__ == "__main__":
    main()
