"""The fleet of several models that the options of `kvloom simulate` describe."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from tools.failures import CommandError
from tools.simulate.fleet.fleet import ModelFleet
from tools.simulate.fleet.profile import load_profile

MAX_MODELS: Final = 256
MAX_SHARDS: Final = 4096


def parse_models(text: str, profile: str, capacity_blocks: int | None) -> tuple[ModelFleet, ...]:
    """`text`: MODEL=SHARDS,...; `profile`: one for all models, or MODEL=PROFILE,... Raises CommandError."""
    counts = {name: _count(f"--models {text}", value) for name, value in _pairs("--models", text).items()}
    if not 2 <= len(counts) <= MAX_MODELS:
        raise CommandError(f"--models {text}: expected 2 to {MAX_MODELS} models; one is simulated with --shards")
    if sum(counts.values()) > MAX_SHARDS:
        raise CommandError(f"--models {text}: more than {MAX_SHARDS} shards")
    profiles = dict.fromkeys(counts, profile)
    if "=" in profile:
        profiles = _pairs("--profile", profile)
        _check_names(f"--profile {profile}", profiles, counts)
    return tuple(
        ModelFleet(name=name, num_shards=count, profile=load_profile(profiles[name]), capacity_blocks=capacity_blocks)
        for name, count in counts.items()
    )


def parse_shares(text: str, models: Sequence[ModelFleet]) -> tuple[float, ...]:
    """`text`: MODEL=SHARE,..., of which only the ratios count. Returns the shares in the order of the models. Raises
    CommandError."""
    pairs = _pairs("--model-shares", text)
    names = [model.name for model in models]
    _check_names(f"--model-shares {text}", pairs, names)
    try:
        shares = tuple(float(pairs[name]) for name in names)
    except ValueError as error:
        raise CommandError(f"--model-shares {text}: not numbers") from error
    if not all(0 < share < 1e6 for share in shares):
        raise CommandError(f"--model-shares {text}: expected positive numbers")
    return shares


def _pairs(option: str, text: str) -> dict[str, str]:
    pairs = [part.strip().rpartition("=") for part in text.split(",")]
    found = {name: value for name, _, value in pairs}
    if "" in found or "" in found.values() or len(found) < len(pairs):
        raise CommandError(f"{option} {text}: expected MODEL=VALUE,MODEL=VALUE with each model once")
    return found


def _count(where: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_SHARDS):
        raise CommandError(f"{where}: {text!r} is no number of shards between 1 and {MAX_SHARDS}")
    return int(text)


def _check_names(where: str, found: Iterable[str], expected: Collection[str]) -> None:
    if set(found) != set(expected):
        raise CommandError(f"{where}: expected one for each of the models {', '.join(expected)}")
