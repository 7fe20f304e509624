"""The kept inputs: corpus/TARGET/NAME.json, each with what it found.

{"found": "what went wrong before the fix", "input": ...}
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

CORPUS: Final = Path(__file__).with_name("corpus")


def kept_inputs(target: str) -> list[Path]:
    return sorted((CORPUS / target).glob("*.json"))


def read_input(path: Path) -> Any:
    return json.loads(path.read_bytes())["input"]


def keep_input(target: str, value: Any, found: str) -> Path:
    """Write an input to the corpus, under a name that is to be replaced by one that says what it found."""
    raw = json.dumps(value, sort_keys=True)
    path = CORPUS / target / f"new-{hashlib.sha256(raw.encode()).hexdigest()[:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"found": found, "input": value}, indent=2) + "\n")
    return path
