"""Packed weights in files that several shards map."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from shard_server.engines.torch_engine.kernels.shared_weights import KEPT_SECONDS, MIN_BYTES, SharedWeights  # noqa: E402


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.endswith(str(path))
    return False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int32])
def test_two_shards_map_one_file(tmp_path: Path, dtype: torch.dtype) -> None:
    """The memory of the second is that of the first; type, shape and bits stay."""
    packed = torch.arange(MIN_BYTES, dtype=torch.int32).to(dtype).reshape(64, -1)
    first, second = (SharedWeights(tmp_path / "weights")(packed.clone()) for _ in range(2))
    [path] = files(tmp_path / "weights")
    for found in (first, second):
        assert is_mapped(found, path)
        assert found.dtype == dtype
        assert torch.equal(found, packed)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"x" * 4 * MIN_BYTES])
def test_a_damaged_file_is_not_used(tmp_path: Path, damage: bytes) -> None:
    """Results depend on what was packed, and on nothing else."""
    packed = torch.arange(MIN_BYTES, dtype=torch.int32)
    shared = SharedWeights(tmp_path / "weights")
    shared(packed.clone())
    [path] = files(tmp_path / "weights")
    path.write_bytes(damage)
    again = packed.clone()
    assert shared(again) is again


def test_where_nothing_can_be_written_a_shard_has_its_own(tmp_path: Path) -> None:
    """As before there were files."""
    (tmp_path / "weights").write_text("no folder")
    packed = torch.arange(MIN_BYTES, dtype=torch.int32)
    assert SharedWeights(tmp_path / "weights")(packed) is packed


def test_files_that_nobody_uses_any_more_are_removed(tmp_path: Path) -> None:
    """Each version of a model, and each kernel family, has its own."""
    shared = SharedWeights(tmp_path / "weights")
    used, unused = (shared(torch.full((MIN_BYTES,), number, dtype=torch.int32)) for number in (1, 2))
    assert used[0] != unused[0]
    [old, _] = files(tmp_path / "weights")
    os.utime(old, (0, old.stat().st_mtime - 2 * KEPT_SECONDS))
    SharedWeights(tmp_path / "weights")
    assert len(files(tmp_path / "weights")) == 1
