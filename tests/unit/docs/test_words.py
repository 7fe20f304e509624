"""The rules of tests/words.py, by examples: `make lint` applies them to the whole repository."""

from __future__ import annotations

import ast
import json
import re

import pytest

from tests import words


@pytest.mark.parametrize(
    "text",
    [
        "Whether it is open.",
        "What a caller is told.",
        "Of one choice.",
        "Likewise, while they do not.",
        "`As` before.",
        "Seconds; the following likewise.",
    ],
)
def test_pieces_of_sentences_are_found(text: str) -> None:
    assert words.is_fragment(text)


@pytest.mark.parametrize("text", ["True when it is open.", "Offers a block.", "", "Asks whether it is open."])
def test_sentences_pass(text: str) -> None:
    assert not words.is_fragment(text)


def test_docstrings_are_those_of_modules_classes_functions_and_attributes() -> None:
    source = (
        '"""m"""\nA = 1\n"""a"""\nclass C:\n    """c"""\n    x: int\n    """x"""\n    def f(self):\n        """f"""\n'
    )
    tree = ast.parse(source + "        self.y = 1\n        'y'\n        print()\n        'none'\n")
    assert sorted(text for _, text in words.docstrings(tree)) == ["a", "c", "f", "m", "x", "y"]


def test_comments_of_protos_are_read_by_block() -> None:
    source = "// A\n// b.\nmessage M {\n  // As in N.\n  string s = 1;\n}\n"
    assert list(words.proto_comments(source)) == [(1, "A b."), (4, "As in N.")]


@pytest.mark.parametrize(
    ("name", "is_good"),
    [
        ("shard_joined", True),
        ("prompt_blocked", True),
        ("spot_notice_received", True),
        ("registry_unreadable", False),
        ("shard up", False),
        ("The registry was read.", False),
        ("draining", False),
    ],
)
def test_events_are_a_subject_and_a_verb_in_the_past_tense(name: str, is_good: bool) -> None:
    assert words.is_event_name(name) is is_good


def test_both_names_of_a_conditional_event_are_read() -> None:
    tree = ast.parse("log.info('a_began' if x else 'b_ended', y=1)\nlog.warning(name)\nother.info('not ours')")
    assert [name for _, name in words.log_events(tree)] == ["a_began", "b_ended", "(name)"]


def test_the_page_lists_every_event() -> None:
    """Operators match names in dashboards and alarms, and must know what there is."""
    page = (words.REPOSITORY / "docs/reference/logs.md").read_text().split("## All events\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    trees = [tree for path, tree in words.trees("structlog|FailureLog") if words.folder_of(path) != words.SDK]
    logged = {name for tree in trees for _, name in words.log_events(tree)}
    assert listed == sorted(name for name in logged if not name.startswith("("))
    assert len(listed) > 150


def test_a_folder_may_not_have_more_than_the_record_says() -> None:
    found = [words.Finding("fragments", "router", f"router/a.py:{line}", "What") for line in (1, 2)]
    found.append(words.Finding("fragments", "control", "control/a.py:1", "What"))
    record = {"fragments": {"router": 2}, "events": {}, "class_names": {}}
    assert [finding.folder for finding in words.excess(found, record)] == ["control"]
    assert len(words.excess(found, {**record, "fragments": {"router": 1}})) == 3


def test_the_record_falls_and_never_rises() -> None:
    record = {"fragments": {"router": 2, "edge_http": 3, "control": 1}, "events": {}, "class_names": {}}
    counts = {"fragments": {"router": 1, "edge_http": 5}, "events": {"router": 4}, "class_names": {}}
    lowered = words.lowered(counts, record)
    assert lowered["fragments"] == {"router": 1, "edge_http": 3}
    assert lowered["events"] == {}


def test_the_record_names_folders_that_there_are() -> None:
    record = json.loads(words.RECORD.read_text())
    assert set(record) == {"fragments", "events", "class_names"}
    assert not [
        name for rule in ("fragments", "events") for name in record[rule] if not (words.REPOSITORY / name).exists()
    ]
