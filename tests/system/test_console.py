"""The project's one table and one progress bar."""

import io

import pytest

from msrnn.system.console import progress, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_stands_to_the_left_and_numbers_to_the_right() -> None:
    rows = [("full", 4096, "-", "all tokens"), ("window+4:256", 256, "+0.35 (+0.10 to +0.60)", "recent")]
    assert table(rows, ("policy", "tokens", "over full", "what stays")).splitlines() == [
        "policy        tokens               over full  what stays",
        "full           4,096                       -  all tokens",
        "window+4:256     256  +0.35 (+0.10 to +0.60)  recent",
    ]


def test_a_first_column_of_numbers_stands_to_the_right() -> None:
    assert table([(9, "0.5"), (10, "")], ("layer", "share")).splitlines() == [
        "layer  share",
        "    9    0.5",
        "   10",
    ]


def test_a_table_without_rows_is_its_header() -> None:
    assert table([], ("policy", "tokens")) == "policy  tokens"


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells under a header of 2"):
        table([("full",)], ("policy", "tokens"))


def test_quiet_progress_is_silent(monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with progress(3, "reading", "tok", quiet=True) as bar:
        bar.update()
        bar.refresh()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream, delay, interval", [(Terminal(), 0.5, 0.1), (io.StringIO(), 10, 10)])
def test_a_log_gets_a_line_now_and_then(monkeypatch, stream: io.StringIO, delay: float, interval: float) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with progress(5000, "reading", "tok") as bar:
        assert (bar.delay, bar.mininterval) == (delay, interval)
        bar.update(2500)
        assert "reading:  50%" in str(bar)
        assert "2.50k/5.00k" in str(bar)
    assert stream.getvalue() == ""  # done before it was worth a word
