"""Atomic writes: what is there is replaced whole or not at all, and only if it is a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from msrnn.system.files import write_text


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(ValueError, match="pipe is a device or a pipe; give the name of a file"):
            write_text(path, "text")
    assert pipe.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to(target)
    for text in ("new", "newer"):
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert os.listdir(target.parent) == ["target"]
    target.unlink()
    target.parent.rmdir()
    with pytest.raises(ValueError, match="folder is not a folder; make it first"):
        write_text(link, "text")
