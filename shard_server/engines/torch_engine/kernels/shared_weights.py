"""Packed weights that the shards of one machine share: each maps the same files, so that a machine holds them once.

Every shard still packs its weights itself. A file is named by what it contains and compared before it is used, so that
results cannot depend on it; what cannot be kept in a file stays in the shard's own memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

import torch
import xxhash

from kvloom_common.private_file import make_private_folder, write_private_file

MIN_BYTES: Final = 64 * 2**10
"""Smaller tensors are not worth a file."""
KEPT_SECONDS: Final = 30 * 86_400.0
"""Files that no shard has begun to use for so long are removed by the next one that starts."""


class SharedWeights:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with contextlib.suppress(OSError):
            make_private_folder(folder)
            _remove_old(folder)

    def __call__(self, packed: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with the same contents, which is mapped from a file; `packed` itself if that fails. Nothing
        may be written to it."""
        numbers = packed.flatten().view(torch.uint8)
        if numbers.nbytes < MIN_BYTES:
            return packed
        content = numbers.numpy().data
        path = self._folder / f"{xxhash.xxh3_128_hexdigest(content)}.packed"
        try:
            if not path.exists():
                write_private_file(path, bytes(content))
            os.utime(path)
            mapped = torch.from_file(str(path), shared=False, size=numbers.numel(), dtype=torch.uint8)
        except (OSError, RuntimeError):  # e.g. a full disk, or a file that is too short
            return packed
        return mapped.view(packed.dtype).view(packed.shape) if torch.equal(mapped, numbers) else packed


def _remove_old(folder: Path) -> None:
    oldest = time.time() - KEPT_SECONDS
    for path in folder.glob("*.packed"):
        with contextlib.suppress(OSError):  # another shard removes it, too
            if path.stat().st_mtime < oldest:
                path.unlink()
