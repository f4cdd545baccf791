"""Where commands keep compiled programs."""

import os
from pathlib import Path

import pytest

from dgemma_jax.program_cache import VARIABLE, keep_programs


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "none")  # so that it is put back
    monkeypatch.delenv(VARIABLE)


def test_in_the_users_cache_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_programs()
    kept = Path(os.environ[VARIABLE])
    assert kept.is_dir()
    assert kept.is_relative_to(tmp_path / "dgemma-jax")
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    keep_programs()
    assert os.environ[VARIABLE] == "/elsewhere"


def test_without_a_home_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    keep_programs()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_programs()
    assert VARIABLE not in os.environ
