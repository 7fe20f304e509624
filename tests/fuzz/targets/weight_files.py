"""GGUF and safetensors files, mutated where their headers make claims and byte by byte.

A malformed file is one clear error that names it: no crash, no gigabytes, no more than a second; whatever number of
tensors, dimensions or bytes it claims to have.
"""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.byte_edits import EDITS, edited
from tests.fuzz.loader_process import LoaderProcess
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.target import Check, Target
from tests.fuzz.targets.text_files import VALUES

NUMBERS = st.integers(0, 40) | st.sampled_from([2**16, 2**20, 2**31 - 1, 2**32 - 1, 10**9, 2**60, 2**63, 2**64 - 1])
PATCHES = st.lists(
    st.tuples(st.integers(0, 64) | st.integers(0, 30_000), st.sampled_from(["<I", "<Q", "<B"]), NUMBERS).map(list),
    max_size=4,
)
"""[position, format, number]: counts, lengths, types and offsets are such numbers."""
TENSOR_CHANGES = st.lists(
    st.tuples(
        st.integers(0, 40), st.sampled_from(["dtype", "shape", "data_offsets", "x"]), VALUES | st.lists(NUMBERS)
    ).map(list),
    max_size=3,
)
INPUTS = st.one_of(
    st.fixed_dictionaries(
        {"file": st.just("model.gguf"), "patches": PATCHES, "edits": EDITS, "size": st.none() | NUMBERS}
    ),
    st.fixed_dictionaries(
        {
            "file": st.just("model.safetensors"),
            "tensors": TENSOR_CHANGES,
            "patches": PATCHES,
            "edits": EDITS,
            "size": st.none() | NUMBERS,
        }
    ),
)


def content_of(value: Any, valid: bytes) -> bytes:
    raw = valid
    if "tensors" in value:
        raw = _with_tensors(raw, value["tensors"])
    patched = bytearray(raw)
    for at, form, number in value["patches"]:
        at %= max(1, len(patched) - 8)
        struct.pack_into(form, patched, at, number % 256 ** struct.calcsize(form))
    raw = edited(bytes(patched), value["edits"])
    return raw if value["size"] is None else raw[: value["size"]]


def _with_tensors(raw: bytes, changes: list[Any]) -> bytes:
    (size,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + size])
    names = list(header)
    for number, field, replacement in changes:
        header[names[number % len(names)]][field] = replacement
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + size :]


def valid_files(folder: Path) -> dict[str, bytes]:
    from tests.fakes.tiny_llama import tiny_weights, write_tiny_gguf, write_tiny_llama

    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    write_tiny_llama(folder, **tiny, num_key_value_heads=1)
    write_tiny_gguf(folder / "model.gguf", tiny_weights(folder), **tiny, num_key_value_heads=1)
    return {name: (folder / name).read_bytes() for name in ("model.gguf", "model.safetensors")}


@contextlib.asynccontextmanager
async def open_files(_watch: LogWatch) -> AsyncIterator[Check]:
    process = LoaderProcess()
    with tempfile.TemporaryDirectory(prefix="malformed-") as name:
        folder = Path(name)
        valid = valid_files(folder)

        async def check(value: Any) -> None:
            path = folder / value["file"]
            path.write_bytes(content_of(value, valid[value["file"]]))
            await process.check(path.suffix[1:], path)

        try:
            yield check
        finally:
            await process.close()


TARGET = Target("weight_files", INPUTS, open_files, suite_examples=30)
