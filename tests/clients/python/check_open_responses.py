"""The tests of the specification Open Responses, by their command llm-comply: its schemas, events and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import world

COMMAND = Path(sys.executable).parent / "llm-comply"


def outcome(test):
    """What the command says of one of its tests."""
    options = ["-u", f"{world.URL}/v1", "-k", world.KEY, "-m", world.MODEL, "--json", "--timeout", "120", "-f", test]
    done = subprocess.run([COMMAND, *options], capture_output=True, text=True, timeout=170, check=False)
    [result] = json.loads(done.stdout)["results"]
    return result


def assert_passes(test):
    result = outcome(test)
    assert result["status"] == "passed", result["errors"]


@pytest.mark.parametrize(
    "test", ["basic-response", "system-prompt", "multi-turn", "assistant-phase", "response-output-phase-schema"]
)
def test_plain(test):
    """Every field of a response has the type that the specification says."""
    assert_passes(test)


@pytest.mark.parametrize("test", ["streaming-response", "streaming-usage"])
def test_streaming(test):
    """The events, in their order, with one that ends the stream."""
    assert_passes(test)


def test_required_tool():
    """The model is led to call a function."""
    assert_passes("tool-calling")


@pytest.mark.parametrize("test", ["compact-response", "compact-missing-model"])
def test_responses(test):
    """A conversation becomes an item that stands for it."""
    assert_passes(test)


def test_errors():
    """A request that is not valid is refused in the specification's form."""
    assert_passes("error-handling")


def test_errors_of_images():
    """No model that is checked here sees images, and the refusal says so."""
    assert any("HTTP 400" in error for error in outcome("image-input")["errors"])
