"""What has happened to the models."""

from __future__ import annotations

from pathlib import Path

from tools.supervisor.models.history import ModelHistory


def test_events_are_kept_found_and_bounded(tmp_path: Path) -> None:
    """An operator asks months later; the file must not have filled the disk by then, nor one damaged line hide the
    rest."""
    history = ModelHistory(tmp_path, max_events=5)
    assert history.events() == []
    for number in range(4):
        history.add("load", f"m{number}", "done")
    history.add("rollout", "chat@2", "rolled back", "too slow", old="chat", step=2, num_steps=4)
    path = tmp_path / "model-history.jsonl"
    path.write_bytes(path.read_bytes() + b"{broken\n")
    history.add("unload", "m0", "failed", "x" * 5000)
    assert [event.model for event in history.events()] == ["m1", "m2", "m3", "chat@2", "m0"]
    (event,) = history.events("chat")
    assert (event.old, event.step, event.reason) == ("chat", 2, "too slow")
    assert history.events("chat@2") == [event]
    assert len(history.events("m0")[0].reason) == 1000


def test_a_full_disk_is_reported_and_nothing_else(tmp_path: Path) -> None:
    """Models are served without a history."""
    reported: list[str] = []
    (tmp_path / "file").touch()
    ModelHistory(tmp_path / "file" / "below", reported.append).add("load", "m", "done")
    assert len(reported) == 1
