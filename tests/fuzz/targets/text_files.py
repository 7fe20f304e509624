"""The text files that operators write and models come with, mutated by value and byte by byte: the safety policy, the
configuration, the API keys, config.json, tokenizer.json and its companions.

A malformed file is one clear error that names it: no crash, no gigabytes, no more than a second.
"""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

from tests.fakes.tiny_tokenizer import CHATML, byte_fallback_tokenizer, byte_level_tokenizer
from tests.fuzz.byte_edits import EDITS, edited
from tests.fuzz.loader_process import LoaderProcess
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.target import Check, Target, text_of

Draw = Callable[[st.SearchStrategy[Any]], Any]

POLICY: Final = """
[[rules]]
name = "phrase"
applies_to = ["prompt", "answer"]
message = "No."
phrases = ["launch code", "é"]
whole_words = true

[[rules]]
name = "pattern"
patterns = ['A[0-9]{3}', '(a|b)+c']
prefixes = ["A"]
max_length = 8
"""
CONFIG: Final = """
data_dir = "data"
[edge]
port = 8080
trusted_proxies = ["10.0.0.0/8"]
routers = ["a:1"]
[router]
max_queue_seconds = 1.5
[router.placement]
policy = "ect"
[shard]
engine = "sim"
"""
API_KEYS: Final = f"# comment\nalice sha256:{'0' * 64} 2026-11-24\nbob sha256:{'1' * 64}\n"
MODEL_CONFIG: Final = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "vocab_size": 320,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 1,
    "eos_token_id": [2],
}
LLAMA3_CONFIG: Final = {
    **MODEL_CONFIG,
    "model_type": "llama",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TOKENIZER_CONFIG: Final = {
    "eos_token": {"content": "<|im_end|>"},
    "bos_token": "<s>",
    "chat_template": [{"name": "default", "template": CHATML}],
}
GENERATION_CONFIG: Final = {"eos_token_id": [2, 3]}

JSON_FILES: Final[Mapping[str, list[Any]]] = {
    "config.json": [MODEL_CONFIG, LLAMA3_CONFIG],
    "tokenizer.json": [json.loads(make().to_str()) for make in (byte_level_tokenizer, byte_fallback_tokenizer)],
    "tokenizer_config.json": [TOKENIZER_CONFIG],
    "generation_config.json": [GENERATION_CONFIG],
}
TEXT_FILES: Final = {"policy.toml": POLICY, "kvloom.toml": CONFIG, "keys": API_KEYS, "chat_template.jinja": CHATML}
LOADERS: Final = {
    "policy.toml": "policy",
    "kvloom.toml": "kvloom_config",
    "keys": "api_keys",
    "config.json": "model_config",
}
"""The other files are those of a tokenizer."""

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from(
        [2**31, 2**32, 2**60, 10**30, -(2**63), 1e308, 0.5, "Infinity", "", "x", "\ue000", "é🙂", "(", "a{9999}"]
    )
    | st.sampled_from(
        ["ByteLevel", "Sequence", "BPE", "WordPiece", "Unigram", "Metaspace", "TemplateProcessing", "NFC"]
    )
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "a", "content", "id"]), inner),
    max_leaves=4,
)
LINES: Final = (
    *("max_length = 99999999999999999999", "max_length = 0", "patterns = ['(']", "patterns = ['']", "phrases = ['']"),
    *("patterns = ['(((a{1000}){1000}){1000})']", "patterns = ['a{1000}{1000}']", "patterns = ['(?i)\\p{L}{1000}']"),
    *("phrases = ['" + "ab" * 50_000 + "']", "prefixes = ['']", "prefixes = ['\\ud800']", "applies_to = []"),
    *("[" * 5000, "a = " + "[" * 5000, "a = " + "{b=" * 3000, "a." * 3000 + "b = 1", "[[rules]]", "[rules]", "x = 1"),
    *("port = 99999999999999999999999", "port = 1e400", "port = nan", "port = 1979-05-27", "routers = ['x']"),
    *("trusted_proxies = ['x']", "trusted_proxies = ['" + "1" * 5000 + "']", "[edge]", "[edge.edge]", "[[edge]]"),
    *("alice sha256:" + "0" * 63, "alice " * 5, "\u2028", "alice sha256:" + "0" * 64 + " 2026-99-99", "é sha256:0"),
)


@st.composite
def inputs(draw: Draw) -> Any:
    """{"file", "content": bytes} or, for JSON, {"file", "valid": which, "changes": [[path, value]], "edits"}."""
    name = draw(st.sampled_from([*JSON_FILES, *TEXT_FILES, "tokenizer.json"]))
    edits = draw(EDITS) if not draw(st.integers(0, 2)) else []
    if name in JSON_FILES:
        which = draw(st.integers(0, len(JSON_FILES[name]) - 1))
        steps = st.lists(st.integers(0, 400), min_size=1, max_size=5)
        changes = draw(st.lists(st.tuples(steps, VALUES | st.just("DROP")).map(list), min_size=1, max_size=4))
        return {"file": name, "valid": which, "changes": changes, "edits": edits}
    lines = TEXT_FILES[name].splitlines(keepends=True)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(lines)))
        lines[at : at + draw(st.integers(0, 2))] = [draw(st.sampled_from(LINES)) + "\n"]
    raw = edited("".join(lines).encode("utf-8", "surrogatepass"), edits)
    return {"file": name, "content": text_of(raw)}


def content_of(value: Any) -> bytes:
    if "content" in value:
        return value["content"].encode("latin-1")
    document = copy.deepcopy(JSON_FILES[value["file"]][value["valid"]])
    for path, replacement in value["changes"]:
        _change(document, path, replacement)
    return edited(json.dumps(document).encode(), value["edits"])


def _change(node: Any, path: list[int], value: Any) -> None:
    """Walks down as far as it can; each step is a number of a key or an entry."""
    for number, step in enumerate(path):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = keys[step % len(keys)]
        if number + 1 < len(path) and isinstance(node[key], dict | list) and node[key]:
            node = node[key]
            continue
        if value == "DROP":
            del node[key]
        else:
            node[key] = value
        return


@contextlib.asynccontextmanager
async def open_files(_watch: LogWatch) -> AsyncIterator[Check]:
    process = LoaderProcess()
    with tempfile.TemporaryDirectory(prefix="malformed-") as folder:

        async def check(value: Any) -> None:
            name = value["file"]
            await process.check(LOADERS.get(name, "tokenizer"), write_files(Path(folder), name, content_of(value)))

        try:
            yield check
        finally:
            await process.close()


def write_files(folder: Path, name: str, content: bytes) -> Path:
    """The malformed file among good ones."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if name in (*JSON_FILES, "chat_template.jinja"):
        for other, valid in JSON_FILES.items():
            (folder / other).write_text(json.dumps(valid[0]))
    (folder / name).write_bytes(content)
    return folder / name


TARGET = Target("text_files", inputs(), open_files, suite_examples=60)
