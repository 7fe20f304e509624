"""A supervisor's log of its children is bounded in size."""

from __future__ import annotations

from pathlib import Path

from tools.supervisor.logs.bounded_log import BoundedLog


def test_a_log_keeps_at_most_two_files_of_the_limit(tmp_path: Path):
    """A process that logs forever must not fill the disk, and the newest output must be kept."""
    path = tmp_path / "x.log"
    log = BoundedLog(path, max_bytes=100)
    for i in range(100):
        log.write(b"%09d\n" % i)
    log.close()
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(sizes) == {"x.log", "x.log.1"}
    assert max(sizes.values()) <= 100
    assert path.read_bytes().endswith(b"000000099\n")


def test_a_chunk_larger_than_the_limit_is_cut_not_kept_whole(tmp_path: Path):
    """The bound holds for chunks of any size."""
    log = BoundedLog(tmp_path / "x.log", max_bytes=100)
    log.write(b"y" * 1050)
    log.close()
    assert max(file.stat().st_size for file in tmp_path.iterdir()) <= 100


def test_a_new_run_keeps_the_log_of_the_one_before(tmp_path: Path):
    """After a crash and a new `up`, the reason for the crash must still be readable."""
    path = tmp_path / "x.log"
    for text in (b"first", b"second"):
        log = BoundedLog(path)
        log.write(text)
        log.close()
    assert path.read_bytes() == b"second"
    assert (tmp_path / "x.log.1").read_bytes() == b"first"
