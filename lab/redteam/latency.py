"""The CPU time that each layer of the policy takes for harmless texts, in the service and without the way to it."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from lab.redteam.cases import RedTeamCase
from lab.redteam.rules import Layer, policy_text
from safety_svc.connection import prompt_judge
from safety_svc.policy import SafetyPolicy, load_policy
from safety_svc.screen import AnswerScreener, check_prompt

ALL: Final = "all of them"


class Quantiles(NamedTuple):
    """The median and the 99th percentile, in microseconds."""

    p50: float
    p99: float


class LayerLatency(NamedTuple):
    """The times of one layer."""

    prompt: Quantiles
    """For a whole prompt."""
    character: Quantiles
    """For an answer that comes character by character: each of them."""


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """Return the quantiles of times. There must be one at least."""
    ordered = sorted(seconds)
    at = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return Quantiles(*(1e6 * value for value in at))


def latency_by_layer(cases: Sequence[RedTeamCase]) -> Mapping[str, LayerLatency]:
    """Measure the layers one by one and all together, on the texts of these cases."""
    texts = [case.written for case in cases]
    layers = {**{str(layer): (layer,) for layer in Layer}, ALL: tuple(Layer)}
    return {name: _measured(_policy(own), texts) for name, own in layers.items()}


def _policy(layers: Sequence[Layer]) -> SafetyPolicy:
    with tempfile.TemporaryDirectory(prefix="kvloom-redteam-") as folder:
        path = Path(folder) / "policy.toml"
        path.write_text(policy_text(layers), encoding="utf-8")
        return load_policy(path)


def _measured(policy: SafetyPolicy, texts: Sequence[str]) -> LayerLatency:
    prompts: list[float] = []
    characters: list[float] = []
    for text in texts:
        judge = prompt_judge(policy, "", ())
        begin = time.thread_time()
        check_prompt(policy.prompt, text, judge)
        prompts.append(time.thread_time() - begin)
        screener = AnswerScreener(policy.answer, policy.watched_answer, policy.scopes.of("", ()))
        for character in text:
            begin = time.thread_time()
            screener.push(character)
            characters.append(time.thread_time() - begin)
    return LayerLatency(quantiles(prompts), quantiles(characters))
