"""Where converted models are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.models.resolve import model_cache_dir


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_data_directories_share_converted_models(cache: Path, tmp_path: Path) -> None:
    """Each had 261 MB of its own, and each first start took up to a minute."""
    first, second = [model_cache_dir(tmp_path / name) for name in ("first", "second")]
    assert first == second
    assert first.parent == cache / "kvloom" / "models"
    assert first.stat().st_mode & 0o077 == 0, "other users must not put models there"


def test_models_of_an_earlier_version_are_used_where_they_are(cache: Path, tmp_path: Path) -> None:
    """An upgrade must not convert everything once more."""
    own = tmp_path / "data" / "models"
    own.mkdir(parents=True)
    assert model_cache_dir(tmp_path / "data") == own
    assert not cache.exists()


def test_without_a_folder_to_share_each_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service's home directory may not be writable."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert model_cache_dir(tmp_path / "data") == tmp_path / "data" / "models"
