"""The contents of files as their tenants see them: encrypted in the store where bodies are
(orchestrator/seal.py).

A sealed content is a sequence of frames, each encrypted by itself, so that a part of a file can be read without the
rest. The id of a file says whether its content is sealed.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Final

from orchestrator.files.contents import FileContents
from orchestrator.seal import NO_SEAL, BodySeal

_MARK: Final = "x"
"""It follows the prefix of an id, where hexadecimal digits do otherwise."""
_SEALED_PREFIXES: Final = (f"file-{_MARK}", f"part_{_MARK}")
FRAME_BYTES: Final = 64 * 2**10
_SEAL_BYTES: Final = 32
"""A salt and a tag."""
_SEALED_FRAME_BYTES: Final = FRAME_BYTES + _SEAL_BYTES


class TenantContents:
    """Writes and reads contents in the name of their tenants."""

    def __init__(self, contents: FileContents, seal: BodySeal = NO_SEAL) -> None:
        self._contents = contents
        self._seal = seal
        self.delete = contents.delete

    def id_prefix(self, prefix: str) -> str:
        """The prefix of the id of a new content, which `prefix` begins."""
        return f"{prefix}{_MARK}" if self._seal.seals else prefix

    async def write(self, tenant: str, file_id: str, pieces: AsyncIterable[bytes]) -> None:
        """Stores pieces as FileContents does. Raises KvloomError."""
        if _is_sealed(file_id):
            pieces = self._sealed(tenant, file_id, pieces)
        await self._contents.write(file_id, pieces)

    async def read(self, tenant: str, file_id: str) -> AsyncIterator[bytes]:
        """The pieces of a content. Raises KvloomError."""
        if not _is_sealed(file_id):
            async for piece in self._contents.read(file_id):
                yield piece
            return
        rest, number = b"", 0
        async for piece in self._contents.read(file_id):
            rest += piece
            while len(rest) >= _SEALED_FRAME_BYTES:
                yield self._opened(tenant, file_id, number, rest[:_SEALED_FRAME_BYTES])
                rest, number = rest[_SEALED_FRAME_BYTES:], number + 1
        if rest:
            yield self._opened(tenant, file_id, number, rest)

    async def read_part(self, tenant: str, file_id: str, offset: int, num_bytes: int) -> bytes:
        """Raises KvloomError."""
        if not _is_sealed(file_id):
            return await self._contents.read_part(file_id, offset, num_bytes)
        first, last = offset // FRAME_BYTES, (offset + num_bytes - 1) // FRAME_BYTES
        num_sealed = (last + 1 - first) * _SEALED_FRAME_BYTES
        raw = await self._contents.read_part(file_id, first * _SEALED_FRAME_BYTES, num_sealed)
        frames = [raw[start : start + _SEALED_FRAME_BYTES] for start in range(0, len(raw), _SEALED_FRAME_BYTES)]
        found = b"".join(self._opened(tenant, file_id, first + at, frame) for at, frame in enumerate(frames))
        begin = offset - first * FRAME_BYTES
        return found[begin : begin + num_bytes]

    async def _sealed(self, tenant: str, file_id: str, pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        rest, number = b"", 0
        async for piece in pieces:
            rest += piece
            while len(rest) >= FRAME_BYTES:
                yield self._seal.sealed_part(tenant, f"{file_id} {number}", rest[:FRAME_BYTES])
                rest, number = rest[FRAME_BYTES:], number + 1
        if rest:
            yield self._seal.sealed_part(tenant, f"{file_id} {number}", rest)

    def _opened(self, tenant: str, file_id: str, number: int, frame: bytes) -> bytes:
        return self._seal.opened_part(tenant, f"{file_id} {number}", frame)


def _is_sealed(file_id: str) -> bool:
    return file_id.startswith(_SEALED_PREFIXES)
