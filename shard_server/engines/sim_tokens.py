"""Computes the answers of the simulated engine: text, a pure function of (prompt, seed, position) and the model's
`shard.sim.answer_seed`, so that any token can be checked anywhere; stamps, embeddings and adapters."""

from __future__ import annotations

import functools
import hashlib
import math
import re
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Final

import xxhash

from kvloom_common.text.block_hash import token_bytes
from shard_server.engines.base import AdapterInfo, Pooling, PoolingKind

# 256 tokens of the built-in model's vocabulary, each a space and the (beginning of a) common word. Any byte-level or
# sentencepiece vocabulary of a Llama-family model has ordinary tokens here too.
# fmt: off
WORD_TOKEN_IDS: Final = (
    502, 503, 523, 527, 540, 550, 563, 592, 597, 599, 600, 601, 606, 618, 623, 634, 639, 645, 655, 656, 665, 670,
    673, 687, 690, 699, 701, 702, 713, 715, 719, 724, 732, 736, 737, 738, 746, 752, 758, 765, 768, 772, 782, 796,
    799, 800, 804, 805, 808, 811, 817, 822, 826, 835, 837, 841, 843, 848, 850, 855, 856, 858, 864, 868, 876, 887,
    889, 893, 896, 897, 904, 905, 908, 910, 913, 914, 915, 919, 929, 934, 937, 939, 940, 944, 946, 965, 966, 967,
    971, 975, 977, 979, 980, 981, 983, 985, 986, 990, 991, 996, 999, 1003, 1006, 1008, 1012, 1015, 1016, 1022, 1026,
    1027, 1028, 1029, 1030, 1035, 1036, 1042, 1048, 1054, 1055, 1056, 1058, 1062, 1066, 1067, 1070, 1072, 1075,
    1083, 1085, 1086, 1090, 1092, 1098, 1105, 1106, 1108, 1109, 1114, 1115, 1120, 1122, 1123, 1124, 1125, 1127,
    1128, 1129, 1130, 1135, 1137, 1138, 1142, 1144, 1149, 1151, 1157, 1161, 1162, 1163, 1164, 1165, 1167, 1174,
    1176, 1178, 1181, 1183, 1187, 1188, 1190, 1192, 1199, 1202, 1204, 1205, 1208, 1215, 1217, 1225, 1230, 1234,
    1235, 1238, 1239, 1242, 1248, 1251, 1252, 1261, 1263, 1273, 1277, 1284, 1285, 1291, 1296, 1297, 1301, 1308,
    1313, 1329, 1330, 1334, 1336, 1338, 1339, 1341, 1342, 1343, 1345, 1349, 1355, 1359, 1360, 1361, 1363, 1364,
    1365, 1366, 1369, 1372, 1376, 1378, 1379, 1380, 1384, 1386, 1391, 1398, 1402, 1403, 1406, 1407, 1420, 1438,
    1439, 1440, 1441, 1445, 1446, 1449, 1450, 1453, 1454, 1458, 1461, 1462, 1463, 1464, 1473, 1474, 1477, 1478,
    1479, 1481, 1485,
)
# fmt: on

_MASK_64: Final = 2**64 - 1
_SPREAD: Final = 0x9E3779B97F4A7C15


def expected_token_id(prompt_token_ids: Sequence[int], seed: int, position: int, adapter_checksum: str = "") -> int:
    """The token that the simulated engine emits at output `position` (0 = the first) after this prompt."""
    return token_at(sequence_key(prompt_token_ids, seed, adapter_checksum), position)


def sequence_key(prompt_token_ids: Sequence[int], seed: int, adapter_checksum: str = "", answer_seed: int = 0) -> int:
    """The 64-bit key of a sequence for `token_at`."""
    if adapter_checksum:
        seed ^= xxhash.xxh3_64_intdigest(adapter_checksum.encode())
    key = xxhash.xxh3_64_intdigest(token_bytes(prompt_token_ids), seed=seed & _MASK_64)
    return key ^ (answer_seed * _SPREAD & _MASK_64)


def token_at(key: int, position: int) -> int:
    return WORD_TOKEN_IDS[xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), seed=key) & 0xFF]


TICK_SECONDS: Final = 20e-6
NUM_STAMPS: Final = 16_384
"""A stamp encodes a time modulo this many ticks, a third of a second."""
_WORD: Final = re.compile(r" [a-z]{2,12}")


def stamp_token_ids(token_texts: Sequence[str | None]) -> tuple[int, ...]:
    """The first NUM_STAMPS tokens that are a space and a plain word, with distinct texts. Raises ValueError when the
    vocabulary has fewer."""
    found: dict[str, int] = {}
    for token_id, text in enumerate(token_texts):
        if text and _WORD.fullmatch(text):
            found.setdefault(text, token_id)
            if len(found) == NUM_STAMPS:
                return tuple(found.values())
    raise ValueError(f"the vocabulary has only {len(found)} plain words, stamps need {NUM_STAMPS}")


def stamp_of(seconds: float) -> int:
    """The index in the list that encodes a point in time or a duration."""
    return int(seconds / TICK_SECONDS) % NUM_STAMPS


def seconds_since(stamp: int, now: float) -> float:
    """How many seconds before `now` a token with this stamp was made, modulo the list's length."""
    return ((now / TICK_SECONDS) - stamp) % NUM_STAMPS * TICK_SECONDS


EMBEDDING_SIZE: Final = 64
_BYTES_PER_DIGEST: Final = 16
_MIDDLE: Final = 127.5


def sim_embedding(token_ids: Sequence[int], pooling: Pooling) -> bytes:
    """The vector of a prompt, as little-endian float32 [EMBEDDING_SIZE]."""
    if pooling.kind is PoolingKind.LAST:
        token_ids = token_ids[-1:]
    elif pooling.kind is PoolingKind.CLS:
        token_ids = token_ids[:1]
    mean = [sum(column) / len(token_ids) for column in zip(*map(_token_vector, token_ids), strict=True)]
    length = math.sqrt(math.fsum(value * value for value in mean)) or 1.0
    vector = array("f", [value / length for value in mean] if pooling.normalize else mean)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


@functools.lru_cache(maxsize=4096)
def _token_vector(token_id: int) -> tuple[float, ...]:
    """Each dimension is between -1 and 1."""
    seeds = range(EMBEDDING_SIZE // _BYTES_PER_DIGEST)
    digest = b"".join(xxhash.xxh3_128_digest(token_id.to_bytes(4, "little"), seed=seed) for seed in seeds)
    return tuple((byte - _MIDDLE) / _MIDDLE for byte in digest)


def sim_adapter_checksum(name: str, path: str) -> str:
    """The checksum of a simulated adapter, which is the same on all shards."""
    return hashlib.sha256(f"{name}\0{path}".encode()).hexdigest()


class SimAdapterReader:
    """Nothing is read: an adapter's path may be any."""

    def __init__(self, load_seconds: float) -> None:
        self._load_seconds = load_seconds

    def read(self, name: str, path: str) -> AdapterInfo:
        return AdapterInfo(name, path, sim_adapter_checksum(name, path))

    def load(self, adapter: AdapterInfo) -> str:
        """The checksum, which stands for the weights."""
        time.sleep(self._load_seconds)
        return adapter.checksum
