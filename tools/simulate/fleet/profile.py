"""The profile of a shard: a roofline model of the duration of one step.

    step seconds = max(tw, a·x) + Σ q·x·(position + x/2)
                   + kv·(context tokens in decode) + 2e-5·(sequences in decode)

Here x is the number of prefill tokens of one request in this step. The profiles 8b and 70b follow the H100 datasheet
(989e12 FLOPS and 3.35e12 bytes/s of HBM per GPU); their utilisations are assumptions. 8b-h100 has the steps that this
repository's torch engine was measured to take (docs/notes/engines/gpu.md#steps-of-an-h100).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from tools.failures import CommandError

_FLOPS: Final = 989e12
_HBM_BYTES_PER_SECOND: Final = 3.35e12

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(gt=0)]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model and the machine of one shard. A file for `--profile FILE` has this structure in JSON or TOML."""

    name: str
    step_floor_seconds: Positive
    """The time to read the weights once, plus overhead. No step is shorter (tw)."""
    seconds_per_prefill_token: Positive
    """Matrix products (a)."""
    seconds_per_attention_pair: Annotated[float, msgspec.Meta(ge=0)]
    """Prefill attention, per (token, context position) pair (q)."""
    seconds_per_context_token: Annotated[float, msgspec.Meta(ge=0)]
    """Decode attention: reading the KV of one token of context (kv)."""
    seconds_per_decode_sequence: Annotated[float, msgspec.Meta(ge=0)] = 2e-5
    chunk_tokens: PositiveInt
    """The largest number of prefill tokens in one step."""
    capacity_tokens: PositiveInt
    """The capacity of the KV cache."""
    max_batch: PositiveInt = 256
    kv_bytes_per_token: PositiveInt = 131072


def _roofline(
    *,
    name: str,
    params: float,
    num_layers: int,
    hidden_size: int,
    kv_bytes_per_token: int,
    num_gpus: int,
    compute_utilisation: float,
    bandwidth_utilisation: float,
    overhead_seconds: float,
    chunk_tokens: int,
    capacity_tokens: int,
) -> Profile:
    flops = _FLOPS * num_gpus
    bandwidth = _HBM_BYTES_PER_SECOND * num_gpus * bandwidth_utilisation
    return Profile(
        name=name,
        step_floor_seconds=2 * params / bandwidth + overhead_seconds,
        seconds_per_prefill_token=2 * params / (flops * compute_utilisation),
        seconds_per_attention_pair=4 * num_layers * hidden_size / (flops * 0.4),
        seconds_per_context_token=kv_bytes_per_token / bandwidth,
        chunk_tokens=chunk_tokens,
        capacity_tokens=capacity_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
    )


_ROOFLINES: Final = {
    "8b": _roofline(
        name="8b",
        params=8.03e9,
        num_layers=32,
        hidden_size=4096,
        kv_bytes_per_token=131072,
        num_gpus=1,
        compute_utilisation=0.50,
        bandwidth_utilisation=0.75,
        overhead_seconds=1.5e-3,
        chunk_tokens=2048,
        capacity_tokens=400_000,
    ),
    "70b": _roofline(
        name="70b",
        params=70.6e9,
        num_layers=80,
        hidden_size=8192,
        kv_bytes_per_token=327680,
        num_gpus=8,
        compute_utilisation=0.45,
        bandwidth_utilisation=0.70,
        overhead_seconds=4.2e-3,
        chunk_tokens=4096,
        capacity_tokens=1_250_000,
    ),
}

PROFILES: Final = {
    **_ROOFLINES,
    # Measured: a step takes 7.4, 8.9, 13.6 and 22.0 ms for 1, 32, 128 and 256 sequences of about 510 tokens; prompts
    # are computed at 20,000 (430 tokens each) to 27,000 tokens a second (3,030). How much of the time per sequence its
    # context takes was not measured, and is that of the roofline, as are attention and the capacity.
    "8b-h100": msgspec.structs.replace(
        _ROOFLINES["8b"],
        name="8b-h100",
        step_floor_seconds=7.1e-3,
        seconds_per_prefill_token=3.45e-5,
        seconds_per_decode_sequence=2.85e-5,
    ),
}


def load_profile(name_or_path: str) -> Profile:
    """Raises CommandError."""
    if name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(name_or_path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CommandError(
            f"--profile {name_or_path}: neither {', '.join(PROFILES)} nor a file that can be read "
            f"({error.strerror or error})"
        ) from error
    decode = msgspec.toml.decode if path.suffix.lower() == ".toml" else msgspec.json.decode
    try:
        return decode(content, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error
