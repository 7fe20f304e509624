"""The simulated engine's text: a pure function of (prompt, seed, position) and the model's `shard.sim.answer_seed`; any
token can be checked anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from kvloom_common.text.block_hash import token_bytes

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
