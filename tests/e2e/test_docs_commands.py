"""The documents' commands run as they are written and print what is written below them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.documentation import Example, find_examples, missing_from
from tests.e2e.fabric import REPOSITORY, RunningFabric

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
FABRICS = {Path("docs/tenancy.md"): "control"}
"""For documents whose commands need another fabric than the others' `torch`."""
EXAMPLES = [
    (path.relative_to(REPOSITORY), example) for path in DOCUMENTS for example in find_examples(path.read_text())
]


@pytest.mark.parametrize(
    ("path", "example"),
    [
        pytest.param(
            path, example, id=f"{path}:{example.name}", marks=pytest.mark.xdist_group(FABRICS.get(path, "torch"))
        )
        for path, example in EXAMPLES
    ],
)
def test_a_documented_command_does_what_the_document_says(
    path: Path, example: Example, request: pytest.FixtureRequest
) -> None:
    """A command that no longer runs costs a reader's trust. The default ports stand for the fabric's own."""
    fabric: RunningFabric = request.getfixturevalue(f"{FABRICS.get(path, 'torch')}_fabric")
    http_address = fabric.http_url.removeprefix("http://")
    command = example.command.replace("127.0.0.1:8080", http_address).replace("localhost:8080", http_address)
    command = command.replace("127.0.0.1:8081", fabric.router_address)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env=fabric.env,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if example.output is not None:
        missing = missing_from(done.stdout, example.output)
        assert missing is None, f"not printed in its place: {missing}\n--- printed:\n{done.stdout}\n{done.stderr}"


def test_a_command_is_run_in_the_shell_of_the_one_before_it() -> None:
    """A walk-through sets a variable once, as its reader does."""
    block = "<!-- test: {} -->\n```bash\n{}\n```\n"
    markdown = block.format("set", "A=1; echo $A") + block.format("use after set", "echo $A$A")
    _, use = find_examples(markdown)
    done = subprocess.run(["bash", "-euc", use.command], capture_output=True, text=True, timeout=10, check=True)
    assert (use.name, done.stdout) == ("use", "11\n")
    with pytest.raises(ValueError, match="does not come before"):
        find_examples(block.format("use after set", "echo"))


def test_the_readme_shows_commands():
    """Were the markers misspelled, nothing would be tested and nothing would fail."""
    assert any(str(path) == "README.md" for path, _ in EXAMPLES)


@pytest.mark.parametrize(
    ("printed", "documented", "missing"),
    [
        ("a\nb\nc\n", "a\nc\n", None),
        ("a\nb\n", "b\na\n", "a"),
        ('{"id":"x-17","n":1}', '{"id":"x-…","n":1}', None),
        ('{"id":"x-17","n":1}', '{"id":"x-…","n":2}', '","n":2}'),
    ],
)
def test_output_is_compared_in_order_with_wildcards(printed: str, documented: str, missing: str | None):
    """The comparison must let ids differ and nothing else."""
    assert missing_from(printed, documented) == missing
