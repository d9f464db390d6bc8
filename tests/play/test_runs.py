"""A run by hand, without a server: what a page is told while a piece is being read."""

from __future__ import annotations

from msrnn.play.runs import Models, Run
from msrnn.play.settings import Limits, Settings
from tests.play.conftest import tiny

TEXT = "the river and the old captain"


def begun(speed: float | None = 20.0) -> tuple[Run, Models]:
    """A run whose template has been read."""
    run, models = Run(Settings("text", TEXT, ("tova:8",), False, None, speed), Limits()), Models(tiny)
    while run.reading is None or run.reading.seen < 6:  # "[user]"
        run.work(models)
    return run, models


def test_a_pause_is_told_when_the_piece_under_way_has_been_read(monkeypatch):
    run, models = begun()
    feed, told = run.reading.feed, []

    def pause_and_feed(*arguments):
        run.control({"action": "pause"})
        told.append(run.state)
        return feed(*arguments)

    monkeypatch.setattr(run.reading, "feed", pause_and_feed)
    before = run.reading.seen
    run.work(models)
    assert told == ["reading"]
    assert run.reading.seen == before + 5
    assert run.state == "paused"


def test_a_run_that_was_paused_before_its_turn_reads_nothing_and_steps_are_not_lost():
    run, models = begun()
    before = run.reading.seen
    run.control({"action": "pause"})
    run.work(models)
    assert run.reading.seen == before
    run.control({"action": "step"})
    assert run.runnable(0.0)
    run.work(models)
    assert run.reading.seen == before + 1
    assert run.state == "paused"
