"""How names and sentences are written here, checked by `make lint`: sentences that can be read alone, one class for a
name, one style for log events.

    python -m tests.words         prints what breaks the rules and exits with 1, or says how much is still to be done
    python -m tests.words list    prints what the record still allows, too
    python -m tests.words record  writes the counts of today into the record, where they have fallen

A folder that the record (tests/baselines/words.json) does not name breaks no rule; the counts of the others may fall
but never rise. Looks at everything that git knows outside tests/.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

REPOSITORY: Final = Path(__file__).resolve().parent.parent
RECORD: Final = REPOSITORY / "tests" / "baselines" / "words.json"
FRAGMENTS: Final = frozenset({"And", "As", "But", "Likewise", "Nor", "Of", "Or", "What", "Whether", "Which", "Whose"})
"""First words of docstrings and help texts that are a piece of somebody else's sentence."""
LOGGER_METHODS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
SDK: Final = "kvloom"
"""The SDK logs sentences with the standard library, as its users expect of a library."""

_FIRST_WORD: Final = re.compile(r"\W*(\w+)")
_LIKEWISE: Final = re.compile(r"\blikewise\b", re.IGNORECASE)
_EVENT: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+")
_PAST: Final = re.compile(
    r"_(?:\w+ed|began|broke|fell|found|kept|left|lost|made|read|sent|slept|taken|withdrawn|withheld|woke|written)(?:_|\Z)"
)


class Finding(NamedTuple):
    """One place that breaks a rule."""

    rule: str
    folder: str
    place: str
    text: str


def folder_of(path: str) -> str:
    """The folder that is counted by itself: one below tools/ or lab/, else the top one."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] in ("tools", "lab") and len(parts) > 2 else parts[0]


def is_fragment(text: str) -> bool:
    """True when a docstring or help text begins as a piece of a sentence, or refers to its neighbour by "likewise"."""
    first = _FIRST_WORD.match(text)
    return (first is not None and first[1] in FRAGMENTS) or _LIKEWISE.search(text) is not None


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring in a module, those below attributes included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            is_documented = isinstance(before, ast.Assign | ast.AnnAssign) or (
                before is None and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            )
            if is_documented and (text := _text_of(statement)) is not None:
                yield statement.lineno, text


def _text_of(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def help_texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each literal `help=`, of options and of commands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield node.value.lineno, str(node.value.value)


def log_events(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each event that is logged; a name that is computed is given as its source."""
    methods = {"FailureLog"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(map(_is_log_method, ast.walk(node.value))):
            methods.update(_last_name(target) for target in node.targets)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if _is_log_method(node.func) or _last_name(node.func) in methods:
            yield from ((node.lineno, name) for name in _names_in(node.args[0]))


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_log_method(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in LOGGER_METHODS
        and isinstance(node.value, ast.Name)
        and node.value.id in ("log", "_log", "logger")
    )


def _names_in(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from _names_in(node.body)
        yield from _names_in(node.orelse)
    else:
        yield node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else f"({ast.unparse(node)})"


def is_event_name(name: str) -> bool:
    """True for `subject_verb` in the past tense, such as `shard_joined`; computed names are judged where they are
    written."""
    return name.startswith("(") or (_EVENT.fullmatch(name) is not None and _PAST.search(name) is not None)


def proto_comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each block of comments in a proto file: the reference of the gRPC API."""
    for match in re.finditer(r"(?:^[ \t]*//.*\n)+", source, re.MULTILINE):
        yield source.count("\n", 0, match.start()) + 1, re.sub(r"\s*// ?", " ", match[0]).strip()


def public_classes(tree: ast.Module) -> Iterator[str]:
    """Names of the public classes of a module."""
    return (node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))


def python_files() -> list[str]:
    """Paths of the Python files that are the fabric's own and no tests."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [path for path in sorted(set(listed)) if not path.startswith("tests/") and (REPOSITORY / path).exists()]


def trees(containing: str = "") -> Iterator[tuple[str, ast.Module]]:
    """Each file of ours with its syntax tree; only those in which a pattern is found."""
    for path in python_files():
        source = (REPOSITORY / path).read_text(encoding="utf-8")
        if re.search(containing, source):
            yield path, ast.parse(source)


def findings() -> Iterator[Finding]:
    """All places that break a rule, those that the record allows included."""
    classes: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees():
        folder = folder_of(path)
        for line, text in (*docstrings(tree), *help_texts(tree)):
            if is_fragment(text):
                yield Finding("fragments", folder, f"{path}:{line}", text.strip().splitlines()[0])
        if folder != SDK:
            for line, name in log_events(tree):
                if not is_event_name(name):
                    yield Finding("events", folder, f"{path}:{line}", name)
        for name in public_classes(tree):
            classes[name].append(path)
    for path in sorted((REPOSITORY / "protos").rglob("*.proto")):
        for line, text in proto_comments(path.read_text(encoding="utf-8")):
            if is_fragment(text):
                yield Finding("fragments", "protos", f"{path.relative_to(REPOSITORY)}:{line}", text)
    for name, paths in sorted(classes.items()):
        for path in paths[1:]:
            yield Finding("class_names", name, path, f"{name} is the name of a class in {paths[0]}, too")


def counts_of(found: list[Finding]) -> dict[str, dict[str, int]]:
    """How often each rule is broken, by folder, and for class names by name."""
    counts: dict[str, Counter[str]] = {"fragments": Counter(), "events": Counter(), "class_names": Counter()}
    for finding in found:
        counts[finding.rule][finding.folder] += 1
    return {rule: dict(sorted(by_folder.items())) for rule, by_folder in counts.items()}


def excess(found: list[Finding], record: Mapping[str, Mapping[str, int]]) -> list[Finding]:
    """The findings in folders that have more of them than the record allows."""
    counts = counts_of(found)
    return [each for each in found if counts[each.rule][each.folder] > record[each.rule].get(each.folder, 0)]


def lowered(
    counts: Mapping[str, Mapping[str, int]], record: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """The record with the counts of today where those are lower, without the folders that are done."""
    return {
        rule: {
            folder: min(allowed, counts[rule][folder])
            for folder, allowed in record[rule].items()
            if counts[rule].get(folder, 0)
        }
        for rule in record
    }


def main(arguments: list[str]) -> int:
    """Checks, lists or records; returns the exit status."""
    found = list(findings())
    record = json.loads(RECORD.read_text())
    if arguments == ["record"]:
        RECORD.write_text(json.dumps(lowered(counts_of(found), record), indent=2) + "\n")
        return 0
    too_many = excess(found, record)
    for finding in found if arguments == ["list"] else too_many:
        print(f"{finding.place}: {finding.rule}: {finding.text}")
    totals = {rule: sum(counts.values()) for rule, counts in counts_of(found).items()}
    print(f"words: {totals} left; more than tests/baselines/words.json allows: {len(too_many)}")
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
