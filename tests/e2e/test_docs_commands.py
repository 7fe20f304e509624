"""The documents' commands run as they are written and print what is written below them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.documentation import BEHIND_EXAMPLE, Example, find_walks, missing_from, script_of
from tests.e2e.fabric import REPOSITORY, RunningFabric

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
FABRICS = {Path("docs/operate/tenancy.md"): "control"}
"""For documents whose commands need another fabric than the others' `torch`."""
WALKS = [(path.relative_to(REPOSITORY), walk) for path in DOCUMENTS for walk in find_walks(path.read_text())]


@pytest.mark.parametrize(
    ("path", "walk"),
    [
        pytest.param(
            path, walk, id=f"{path}:{walk[-1].name}", marks=pytest.mark.xdist_group(FABRICS.get(path, "torch"))
        )
        for path, walk in WALKS
    ],
)
def test_documented_commands_do_what_the_document_says(
    path: Path, walk: list[Example], request: pytest.FixtureRequest
) -> None:
    """A command that no longer runs costs a reader's trust. The default ports stand for the fabric's own."""
    fabric: RunningFabric = request.getfixturevalue(f"{FABRICS.get(path, 'torch')}_fabric")
    http_address = fabric.http_url.removeprefix("http://")
    script = script_of(walk).replace("127.0.0.1:8080", http_address).replace("localhost:8080", http_address)
    script = script.replace("127.0.0.1:8081", fabric.router_address)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=fabric.env,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for example, printed in zip(walk, done.stdout.split(BEHIND_EXAMPLE), strict=False):
        if example.output is not None:
            missing = missing_from(printed, example.output)
            assert missing is None, f"{example.name}: not printed in its place: {missing}\n--- printed:\n{printed}"


def test_a_command_is_run_in_the_shell_of_the_one_before_it() -> None:
    """A walk-through sets a variable once, as its reader does."""
    block = "<!-- test: {} -->\n```bash\n{}\n```\n"
    markdown = block.format("set", "A=1; echo $A") + block.format("alone", "true")
    alone, walk = find_walks(markdown + block.format("use after set", "echo $A$A"))
    done = subprocess.run(["bash", "-euc", script_of(walk)], capture_output=True, text=True, timeout=10, check=True)
    assert [example.name for example in walk] == ["set", "use"]
    assert done.stdout.split(BEHIND_EXAMPLE) == ["1\n", "11\n", ""]
    assert [example.name for example in alone] == ["alone"]
    with pytest.raises(ValueError, match="does not come before"):
        find_walks(block.format("use after set", "echo"))


def test_the_readme_shows_commands():
    """Were the markers misspelled, nothing would be tested and nothing would fail."""
    assert any(str(path) == "README.md" for path, _ in WALKS)


def event(key: str, text: str) -> str:
    return f'data: {{"{key}":{{"content":"{text}"}}}}\n'


THE, PARIS, DOT = (event("delta", text) for text in ("The", " Paris", "."))


@pytest.mark.parametrize(
    ("printed", "documented", "missing"),
    [
        ("a\nb\nc\n", "a\nc\n", None),
        ("a\nb\n", "b\na\n", "a"),
        ('{"id":"x-17","n":1}', '{"id":"x-…","n":1}', None),
        ('{"id":"x-17","n":1}', '{"id":"x-…","n":2}', '","n":2}'),
        (f"{THE}{PARIS}{DOT}", f"{THE}{PARIS}", None),
        (f"{THE}{event('delta', ' Paris.')}", f"{THE}{PARIS}", None),
        (f"{THE}{event('delta', ' Par')}{event('delta', 'is')}", f"{THE}{PARIS}", None),
        (event("delta", "The Paris"), f"{THE}{PARIS}", event("delta", "text").strip()),
        (f"{THE}{DOT}{PARIS}", f"{DOT}{THE}", "The"),
        (f"{THE}{event('delta', ' Rome')}", f"{THE}{PARIS}", " Paris"),
        (f"{THE}{event('message', ' Paris')}", f"{THE}{PARIS}", event("delta", "text").strip()),
    ],
)
def test_output_is_compared_in_order_with_wildcards(printed: str, documented: str, missing: str | None):
    """The comparison must let ids differ, and which event brings a token, and nothing else."""
    assert missing_from(printed, documented) == missing
