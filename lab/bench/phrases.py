"""`kvloom-lab bench phrases`: what deny lists of many phrases cost the safety service and the router on this machine.

Phrases are two or three made-up words, and texts are made-up words of which some are much more frequent than others.
Most lists have names that texts do not have, made of the same syllables; one has the words of the texts.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import psutil

from lab.bench.experiment import Column, Report, TableOf, experiment
from lab.flags import count, flag
from router.links.prefilter import Prefilter
from router.links.prompt_filter import PromptFilter
from safety_svc.policy import SafetyPolicy
from safety_svc.policy_file import PolicyFile
from safety_svc.screen import CHARS_PER_SLICE, AnswerScreener, check_prompt

NUM_WORDS: Final = 20_000
SYLLABLES: Final = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "or", "st")]
TEXT_CHARS: Final = 400_000
NUM_TOKENS: Final = 20_000
ROUNDS: Final = 3
"""The shortest is told."""
TOKENS_PER_ANSWER: Final = 400
ORDINARY: Final = "words of the text"
CASES: Final[dict[str, dict[str, bool]]] = {
    "names": {},
    "names, confusables": {"confusables": True},
    "names, spaced": {"spaced": True},
    ORDINARY: {},
}
"""The names of the rows, and what the rule of each asks for."""


def run_bench(
    sizes: Sequence[int], num_tokens: int = NUM_TOKENS, text_chars: int = TEXT_CHARS, num_words: int = NUM_WORDS
) -> list[dict[str, Any]]:
    """Measure one list after the other. All times are readings of this thread's CPU clock."""
    draw = random.Random(1)
    made = sorted({"".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(4 * num_words)})
    draw.shuffle(made)
    words, names = made[:num_words], made[num_words:]
    text = " ".join(itertools.islice(_written(words, draw), text_chars // 5))[:text_chars]
    tokens = list(itertools.islice(_tokens(words, draw), num_tokens))
    rows = [_measure("no list", None, text, tokens)]
    for size in sizes:
        for case, fields in CASES.items():
            source = words if case == ORDINARY else names
            phrases = [" ".join(draw.sample(source, draw.randint(2, 3))) for _ in range(size)]
            rows.append({"size": size, **_measure(case, {"phrases": phrases, **fields}, text, tokens)})
    return rows


def _measure(case: str, fields: dict[str, Any] | None, text: str, tokens: Sequence[str]) -> dict[str, Any]:
    rule = "" if fields is None else '[[rules]]\nname = "list"\n'
    rule += "".join(f"{field} = {json.dumps(value)}\n" for field, value in (fields or {}).items())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy.toml")
        path.write_text(rule)
        gc.collect()
        before = psutil.Process().memory_info().rss
        load_seconds, policy_file = _timed(lambda: PolicyFile(str(path)))
        gc.collect()
        mib = (psutil.Process().memory_info().rss - before) / 2**20
    policy = policy_file.current
    search_seconds, _ = _timed(lambda: _search(policy, text), ROUNDS)
    screen_seconds, (num_withheld, num_halted) = _timed(lambda: _screen(policy, tokens), ROUNDS)
    announced = policy_file.state
    compile_seconds, prefilter = _timed(lambda: Prefilter.from_policy(announced))
    prompt_seconds, _ = _timed(lambda: PromptFilter.from_policy(announced))
    clear_seconds, num_sent = _timed(lambda: _num_sent(prefilter, tokens), ROUNDS)
    return {
        "list": case,
        "load_s": round(load_seconds, 3),
        "mib": round(mib, 1),
        "mb_s": round(len(text) / 1e6 / search_seconds, 2),
        "us_token": round(1e6 * screen_seconds / len(tokens), 3),
        "withheld_chars": round(num_withheld / len(tokens), 2),
        "halted": num_halted,
        "announced_kib": round(announced.ByteSize() / 1024, 1),
        "router_ms": round(1e3 * (compile_seconds + prompt_seconds), 1),
        "router_us_token": round(1e6 * clear_seconds / len(tokens), 3),
        "sent": round(num_sent / len(tokens), 3),
    }


def _num_sent(prefilter: Prefilter | None, tokens: Sequence[str]) -> int:
    return len(tokens) if prefilter is None else sum(map(prefilter.is_suspicious, tokens))


def _search(policy: SafetyPolicy, text: str) -> None:
    """In the slices of long prompts. A hit changes nothing: each slice is judged by itself."""
    for start in range(0, len(text), CHARS_PER_SLICE):
        check_prompt(policy.prompt, text[start : start + CHARS_PER_SLICE])


def _screen(policy: SafetyPolicy, tokens: Sequence[str]) -> tuple[int, int]:
    """Screen answers token by token. Returns how many characters were withheld after tokens, all together, and how many
    answers were halted; what would follow is screened as another answer."""
    num_withheld = num_halted = 0
    for start in range(0, len(tokens), TOKENS_PER_ANSWER):
        screener, num_chars = AnswerScreener(policy.answer), 0
        for token in tokens[start : start + TOKENS_PER_ANSWER]:
            screener.push(token)
            num_chars += len(token)
            num_withheld += num_chars - screener.num_clear_chars
            if screener.hit is not None:
                num_halted += 1
                screener, num_chars = AnswerScreener(policy.answer), 0
    return num_withheld, num_halted


def _written(words: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Words by Zipf's law, as in ordinary text."""
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(words) + 1)))
    while True:
        yield from draw.choices(words, cum_weights=weights, k=1000)


def _tokens(words: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Short words are one token, and others two."""
    for word in _written(words, draw):
        cut = len(word) if len(word) <= 6 else draw.randint(3, len(word) - 2)
        yield " " + word[:cut]
        if cut < len(word):
            yield word[cut:]


def _timed(function: Callable[[], Any], rounds: int = 1) -> tuple[float, Any]:
    """Return the shortest time of so many rounds, and the last result."""
    shortest, result = math.inf, None
    for _ in range(rounds):
        begin = time.thread_time()
        result = function()
        shortest = min(shortest, time.thread_time() - begin)
    return shortest, result


_COLUMNS: Final = (
    Column("phrases", lambda row: row.get("size", 0), ","),
    Column("list", "list", is_left=True),
    Column("load s", "load_s", ".2f"),
    Column("MiB", "mib", ".0f"),
    Column("MB/s", "mb_s", ".1f"),
    Column("µs a token", "us_token", ".2f"),
    Column("withheld chars", "withheld_chars", ".2f"),
    Column("halts", "halted"),
    Column("router KiB", "announced_kib", ".0f"),
    Column("ms", "router_ms", ".0f"),
    Column("µs a token", "router_us_token", ".2f"),
    Column("tokens sent", "sent", ".0%"),
)


@experiment(
    "phrases",
    flag(
        "--phrases",
        click.IntRange(1, 1_000_000),
        (100, 100_000),
        "Length of a list; may be repeated.",
        to="sizes",
        multiple=True,
    ),
    count("--tokens", NUM_TOKENS, "Tokens of answers that are screened.", to="num_tokens"),
)
def bench_phrases(sizes: Sequence[int], num_tokens: int) -> Report:
    """Measure deny lists: loading, memory, search, and the cost of a token, in CPU time of one thread."""
    rows = run_bench(sizes, num_tokens)
    return Report(rows, [TableOf(_COLUMNS, rows)])
