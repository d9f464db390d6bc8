"""Figures of traces: what is drawn is what the trace says."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from msrnn import Trace
from msrnn.analysis import figures
from msrnn.analysis.figures import layers_holding, recent_share, retention_map, visible
from msrnn.core.trace import ALIVE


def window_trace(
    length: int = 40, capacity: int = 8, layers: int = 3, units: int = 1, keep: tuple[int, ...] = (0,)
) -> Trace:
    """A window of `capacity` in even layers; in odd ones the tokens of `keep` stay, and the window is smaller."""
    window = torch.arange(length, dtype=torch.int32) + capacity
    keeping = torch.arange(length, dtype=torch.int32) + capacity - len(keep)
    keeping[list(keep)] = ALIVE
    pair = [torch.where(deaths < length, deaths, ALIVE).expand(1, units, length) for deaths in (window, keeping)]
    return Trace([pair[layer % 2].clone() for layer in range(layers)], f"tova:{capacity}", "some/folder/Tiny")


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3) / 255


def near(path: Path, colour: tuple[float, float, float]) -> float:
    """The share of a picture's pixels that have a colour."""
    return float((np.abs(pixels(path) - colour).max(1) < 0.02).mean())


def test_layers_holding_counts_layers_and_shares_of_units() -> None:
    trace = window_trace(layers=3)
    assert layers_holding(trace, 39)[[0, 1, 32, 39]].tolist() == [1, 0, 2, 3]
    assert layers_holding(trace, 3).tolist() == [3] * 4 + [0] * 36
    trace = window_trace(layers=2, units=2)
    trace.deaths[1][0, 1, 0] = 5  # one of the two units lets the first token go
    assert layers_holding(trace, 39)[0] == 0.5


def test_recent_is_what_a_window_would_hold() -> None:
    trace = window_trace(layers=2, keep=(0, 3))
    assert recent_share(trace, 39).tolist() == [1, 0.75]
    assert recent_share(trace, 5).tolist() == [1, 1]


@pytest.mark.parametrize("units", [1, 3])
def test_a_picture_shows_recent_and_older_tokens(tmp_path: Path, units: int) -> None:
    trace = window_trace(length=900, capacity=90, layers=8, units=units, keep=tuple(range(0, 300, 10)))
    path = retention_map(trace, tmp_path / "map.png", tokens=["a"] * 900)
    assert path == tmp_path / "map.png"
    assert 10_000 < path.stat().st_size < 500_000
    assert near(path, figures.RECENT) > 0.02
    assert near(path, figures.OLDER) > 0.01
    assert near(path, (1, 1, 1)) > 0.3


def test_older_is_judged_by_the_size_of_each_head(tmp_path: Path) -> None:
    """One head holds nearly everything; the other is small and has old tokens of its own."""
    small = window_trace(length=400, capacity=40, layers=2, keep=tuple(range(100, 140)))
    trace = Trace([torch.cat([small.deaths[1], window_trace(length=400, capacity=390).deaths[0]], 1)], "fade:avg=215")
    assert layers_holding(trace, 399, only_older=True).nonzero().flatten().tolist() == list(range(100, 140))
    path = retention_map(trace, tmp_path / "map.png")
    picture = np.asarray(Image.open(path).convert("RGB")) / 255
    lower = picture[int(0.6 * len(picture)) : int(0.9 * len(picture)), : picture.shape[1] // 2]
    assert (np.abs(lower - figures.OLDER).max(2) < 0.02).sum() > 50  # of what is held at the end


def test_a_window_has_nothing_older(tmp_path: Path) -> None:
    trace = window_trace(length=400, capacity=50, layers=1)
    path = retention_map(trace, tmp_path / "map.png")
    assert near(path, figures.OLDER) < 0.001  # the legend alone


def test_the_same_trace_gives_the_same_picture(tmp_path: Path) -> None:
    one, two = (retention_map(window_trace(), tmp_path / name) for name in ("a.png", "b.png"))
    assert np.array_equal(pixels(one), pixels(two))


@pytest.mark.parametrize("layers, length, panels", [(0, 1, "0"), ([2, 0], 7, "20"), (None, 2, "012"), ([1], 500, "1")])
def test_any_layers_and_lengths(tmp_path: Path, layers: Any, length: int, panels: str) -> None:
    """One panel per layer in the order asked for; an old token is labelled with its text, whatever that is."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        retention_map(window_trace(length, capacity=5), tmp_path / "map.svg", layers=layers, tokens=["$x^{"] * length)
    text = (tmp_path / "map.svg").read_text()
    assert re.findall(r">layer (\d)<", text) == list(panels)
    assert f"{length:,} tokens" in text
    assert ("'$x^{'" in text) == (length > 5)  # before the state is full, no token is older than a window's


def test_other_formats(tmp_path: Path) -> None:
    assert retention_map(window_trace(), tmp_path / "map.svg").read_text().startswith("<?xml")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    for options, reason in (
        ({"layers": 3}, "no layer 3; the trace has layers 0 to 2"),
        ({"layers": []}, "at least one"),
        ({"tokens": ["a"]}, "1 token texts were given for a trace of 40"),
    ):
        with pytest.raises(ValueError, match=reason):
            retention_map(window_trace(), tmp_path / "map.png", **options)
    with pytest.raises(ValueError, match="empty"):
        retention_map(Trace([], "tova:8"), tmp_path / "map.png")
    with pytest.raises(ValueError, match="not a folder"):
        retention_map(window_trace(), tmp_path / "missing" / "map.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r'needs matplotlib; pip install "\.\[plot\]" in a clone of msrnn'):
        retention_map(window_trace(), tmp_path / "map.png")


@pytest.mark.parametrize("token, shown", [(" the", "' the'"), ("\n\n", r"'\n\n'"), ("a" * 20, f"'{'a' * 11}…'")])
def test_tokens_are_shown_readably(token: str, shown: str) -> None:
    assert visible(token) == shown
