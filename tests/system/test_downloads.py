"""Where downloaded data is kept, and how pip's failures are reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from msrnn.system.downloads import Unavailable, cache_folder, download


@pytest.mark.skipif(sys.platform != "linux", reason="platformdirs chooses other folders elsewhere")
def test_the_cache_folder_is_the_users_unless_msrnn_cache_names_another(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("MSRNN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "msrnn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "msrnn"
    monkeypatch.setenv("MSRNN_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_pips_reason_is_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Unavailable, match=r"pip download no-such-package==1\.0: .+") as caught:
        download("no-such-package==1.0", "0" * 64, tmp_path)
    assert "\n" not in str(caught.value)
