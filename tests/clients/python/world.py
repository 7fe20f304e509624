"""What the checks of all Python clients share: the servers under test, and the questions."""

from __future__ import annotations

import os
import time
import urllib.request
from typing import Literal

from pydantic import BaseModel, Field

URL = os.environ["KVLOOM_URL"]
"""A fabric with a real model, which wants a key. Output that is guided has a known form."""
KEY = os.environ["KVLOOM_API_KEY"]
MODEL = "smollm2-135m-instruct"
SCRIPTED_URL = os.environ["KVLOOM_SCRIPTED_URL"]
"""An edge whose model decides to call `get_weather`, and answers with SNOWS once it has the result "Snow."."""
SCRIPTED_MODEL = "tiny"

CAPITAL = "What is the capital of France? Answer in one short sentence."
PARIS = "The capital of France is Paris."
LONG = "Count to a thousand, slowly."
TOO_LONG = "word " * 20_000
QUESTION = "What is the weather in Oslo?"
SNOWS = "It snows in Oslo."
TOO_LONG_WORDS = "maximum context length|prompt is too long"


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)
    unit: Literal["C", "F"]


WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def assert_becomes_idle() -> None:
    """An aborted request must leave the edge: no other request runs while a client is checked."""
    page = urllib.request.Request(f"{URL}/metrics", headers={"x-api-key": KEY})
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with urllib.request.urlopen(page, timeout=10) as answer:
            if b"\nkvloom_edge_running_requests 0.0\n" in answer.read():
                return
    raise AssertionError("the aborted request still runs after 10 s")
