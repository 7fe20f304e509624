"""Checks receipts, and has some of them computed again."""

from __future__ import annotations

import base64
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from kvloom.errors import KvloomError
from kvloom_common.config import KvloomConfig
from kvloom_common.receipts.checks import ReceiptFault, faults_of
from kvloom_common.receipts.keys import PublicKeys, is_signed
from kvloom_common.receipts.receipt import Bundle, Output
from kvloom_common.text.model_checksum import model_checksum
from tools.receipts.rerun import Rerunner, rerunner

_FLOAT_BYTES: Final = 4


class ReceiptVerdict(msgspec.Struct, frozen=True):
    """The verdict on one receipt."""

    request_id: str
    model: str
    faults: list[ReceiptFault]
    is_rerun: bool = False
    """True when the answer was computed again; with no faults, it was the same, token for token."""
    not_rerun_because: str = ""


def check(bundle: Bundle, keys: PublicKeys | None) -> ReceiptVerdict:
    """Without computing anything. `keys` None: the signature is not checked."""
    faults = list(faults_of(bundle))
    if keys is not None and not is_signed(bundle, keys):
        faults.insert(0, ReceiptFault("signature", "no published key has signed this"))
    return ReceiptVerdict(bundle.receipt.request_id, bundle.receipt.model, faults)


def sample_of(bundles: Sequence[Bundle], count: int | None, seed: int) -> list[int]:
    """The positions of those that are to be computed again; all of them without a count."""
    if count is None or count >= len(bundles):
        return list(range(len(bundles)))
    return sorted(random.Random(seed).sample(range(len(bundles)), count))


async def rerun_all(
    bundles: Sequence[Bundle], config: KvloomConfig, adapters: Mapping[str, Path]
) -> AsyncIterator[tuple[list[ReceiptFault], str]]:
    """For each: its faults, and why it was not computed again ("": it was). `config.model.path` is the model, whose
    engine is `config.shard`'s; `adapters` are directories by name. Raises EngineError, OSError, ValueError,
    ChecksumError if they cannot be loaded."""
    checksum = model_checksum(Path(config.model.path))
    async with rerunner(config, adapters) as engine:
        for bundle in bundles:
            yield await _rerun(bundle, engine, checksum)


async def _rerun(bundle: Bundle, engine: Rerunner, checksum: str) -> tuple[list[ReceiptFault], str]:
    receipt = bundle.receipt
    faults: list[ReceiptFault] = []
    if receipt.weights_checksum and receipt.weights_checksum != checksum:
        faults.append(ReceiptFault("weights", _other_checksum("model", checksum, receipt.weights_checksum)))
    if not receipt.engine_variant:
        return faults, "no one variant of the engine has computed it, or one that promises no bits"
    if receipt.engine_variant != engine.variant:
        return faults, (
            f"it was computed by {receipt.engine_variant}, and this machine computes with {engine.variant}: their bits "
            "cannot be compared"
        )
    if receipt.adapter:
        found = engine.adapter_checksum(receipt.adapter)
        if not found:
            return faults, f"it was computed with the adapter {receipt.adapter}: --adapter {receipt.adapter}=DIRECTORY"
        if found != receipt.adapter_checksum:
            faults.append(ReceiptFault("adapter", _other_checksum("adapter", found, receipt.adapter_checksum)))
    try:
        output = await engine.output(bundle.request, receipt.adapter)
    except (KvloomError, ValueError) as error:
        return [*faults, ReceiptFault("tokens", f"the engine here does not compute it: {error}")], ""
    faults += _differences(bundle.output, output)
    return faults, ""


def _other_checksum(what: str, found: str, said: str) -> str:
    return f"the {what} here has the checksum {found[:16]}..., the receipt says {said[:16]}..."


def _differences(said: Sequence[Output], computed: Sequence[Output]) -> list[ReceiptFault]:
    faults: list[ReceiptFault] = []
    for ours, theirs in zip(sorted(computed, key=_index), sorted(said, key=_index), strict=False):
        if ours.token_ids != theirs.token_ids:
            position = next(
                (i for i, pair in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False)) if pair[0] != pair[1]),
                min(len(ours.token_ids), len(theirs.token_ids)),
            )
            faults.append(ReceiptFault("tokens", f"choice {ours.index} differs from token {position} on"))
        elif (ours.finish_reason, ours.stop_string) != (theirs.finish_reason, theirs.stop_string):
            faults.append(
                ReceiptFault("tokens", f"choice {ours.index} ends by {ours.finish_reason}, not {theirs.finish_reason}")
            )
        if ours.embedding != theirs.embedding:
            faults.append(ReceiptFault("vector", _vector_difference(ours.embedding, theirs.embedding)))
    if sorted(map(_index, said)) != sorted(map(_index, computed)):
        faults.append(ReceiptFault("tokens", "its choices are not those of its request"))
    return faults


def _vector_difference(computed: str | UnsetType, said: str | UnsetType) -> str:
    if computed is UNSET or said is UNSET:
        return "one is an embedding, and the other is none"
    try:
        ours, theirs = base64.b64decode(computed), base64.b64decode(said, validate=True)
    except ValueError:
        return "it is no base64"
    if len(ours) != len(theirs):
        return f"it has {len(theirs)} bytes, computed again {len(ours)}"
    differing = [
        i for i in range(0, len(ours), _FLOAT_BYTES) if ours[i : i + _FLOAT_BYTES] != theirs[i : i + _FLOAT_BYTES]
    ]
    num_dimensions = len(ours) // _FLOAT_BYTES
    return f"{len(differing)} of {num_dimensions} dimensions differ, the first at {differing[0] // _FLOAT_BYTES}"


def _index(output: Output) -> int:
    return output.index
