"""How much of the JSON-Schema-Test-Suite guides accept and honour: `python -m tests.schema_bench [FOLDER]`.

FOLDER has the suite's `*.json` of one draft; without it, that of draft 2020-12 is taken from the source distribution of
the package `jsonschema`, which pip downloads. A schema is *accepted* if it is compiled, and *honoured* if no instance
that the suite calls invalid can be written under its guide. It is *useful* if one that the suite calls valid can be.
A guide may be narrower than its schema: objects have only the properties that their schema names, numbers a bounded
number of digits.

XGrammar is measured beside it where it can be imported. It needs no more than torch's CPU build and numpy for this:
`pip install --no-deps --target FOLDER xgrammar==0.2.8 apache-tvm-ffi`, and FOLDER in PYTHONPATH.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
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
Compiler = Callable[[Any], Callable[[Any], bool] | None]
"""From a schema to what says if an instance can be written; None if it can't be compiled."""


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


def shares(suite: list[Group], guide: Guide, compiler: Compiler) -> Shares:
    accepted = honoured = useful = 0
    for group in suite:
        schema = guide(group.schema)
        writes = None if schema is None else compiler(schema)
        if writes is None:
            continue
        accepted += 1
        if not any(map(writes, group.invalid)):
            honoured += 1
            useful += not group.valid or any(map(writes, group.valid))
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
    """The schema itself; not all compilers know those that are no objects."""
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


def by_llguidance(schema: Any) -> Callable[[Any], bool] | None:
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False), defaults={"whitespace_pattern": _WHITESPACE}
        )
    except ValueError:
        return None
    matcher = LLMatcher(_TOKENIZER, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return None

    def writes(instance: Any) -> bool:
        text = list(json.dumps(instance, ensure_ascii=False).encode())
        found = matcher.deep_copy()
        return found.try_consume_tokens(text) == len(text) and found.is_accepting()

    return writes


def by_xgrammar(schema: Any) -> Callable[[Any], bool] | None:
    """As vLLM compiles it."""
    from xgrammar import Grammar, testing

    try:
        grammar = Grammar.from_json_schema(json.dumps(schema, ensure_ascii=False))
    except RuntimeError:
        return None
    return lambda instance: testing._is_grammar_accept_string(grammar, json.dumps(instance, ensure_ascii=False))


def of_vllm(schema: Any) -> Any:
    """What vLLM gives to XGrammar."""
    return as_given(schema) if passes_vllm(schema) else None


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
    compared: list[tuple[str, Guide, Compiler, list[Group]]] = [
        ("`response_format`, strict tools", followed, by_llguidance, suite),
        ("tools that are not strict, of the schemas with valid objects", relaxed, by_llguidance, objects),
        ("llguidance alone", as_given, by_llguidance, suite),
    ]
    if importlib.util.find_spec("xgrammar") is not None:
        name = f"XGrammar {importlib.metadata.version('xgrammar')}"
        compared += [
            (f"{name} alone", as_given, by_xgrammar, suite),
            (f"{name}, where vLLM uses it", of_vllm, by_xgrammar, suite),
        ]
    for name, guide, compiler, of in compared:
        found = shares(of, guide, compiler)
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
