"""RULER's and BABILong's maps: one number for each policy and kind, `full` first."""

from __future__ import annotations

from pathlib import Path

from msrnn.analysis import ruler
from msrnn.analysis.figures import draw
from tests.support.records import record


def records() -> list:
    rows = []
    for policy, value in (("fade:256", 12.5), ("full", 50.0), ("window+4:256", 25.0)):
        for kind, length in (("niah_single_1", 1024), ("all", 1024), ("all", 2048), ("vt", 2048)):
            rows.append(record("ruler", policy, "match", value, cell={"kind": kind, "length": length}))
        rows.append(record("babilong", policy, "accuracy", value, cell={"kind": "qa1", "length": 1024}))
    return rows


def test_a_number_for_each_policy_and_kind(tmp_path: Path, monkeypatch) -> None:
    texts = []
    monkeypatch.setattr(ruler, "_write", lambda axes, square: texts.append(square.tolist()))
    files = list(draw(records(), tmp_path, only="ruler"))
    assert [file.stat().st_size > 10_000 for _, _, file in files] == [True]
    assert texts == [[[50, 50], [25, 25], [12.5, 12.5]], [[50, 50], [25, 25], [12.5, 12.5]], [[50], [25], [12.5]]]


def test_the_mean_comes_first_and_numbers_are_written(tmp_path: Path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(ruler, "save_figure", lambda figure, path: drawn.append(figure) or path)
    ruler.ruler_maps(records(), tmp_path / "ruler.png")
    first = drawn[0].axes[0]
    assert [label.get_text() for label in first.get_xticklabels()] == ["all", "niah_single_1"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["full", "window+4:256", "fade:256"]
    assert [text.get_text() for text in first.texts] == ["50", "50", "25", "25", "12", "12"]
