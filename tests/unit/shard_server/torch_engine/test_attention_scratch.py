"""The working memory of attention."""

from __future__ import annotations

from numba.core import event

from shard_server.engines.torch_engine.kernels.attention.scratch import AttentionShape, scratch_bytes


def test_its_size_is_known_without_a_compiler():
    """Every start asks for it. It was compiled code, which nothing kept: 0.3 s of each start."""
    shape = AttentionShape(16, 3, 3, 64, 30 * 16 * 384, 384)
    with event.install_recorder("numba:compile") as recorder:
        size = scratch_bytes(shape)
    assert not recorder.buffer
    assert size % 64 == 0
    assert size > 128 * 9 * 64 * 8
