"""The page of `msrnn report`: it needs nothing else, says how each part is made again, and a browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from msrnn.analysis.table import tables
from msrnn.cli import main
from msrnn.eval.record import write_records
from tests.support.records import everything, pg19


class Page(HTMLParser):
    """Collects what a page shows, and whatever it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name in ("src", "href") and value and not value.startswith("data:"):
                self.fetched.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(results), "-o", str(path), "--title", "A & B"]) == 0
    return path


@pytest.mark.slow
def test_the_page_needs_nothing_else(page: Path, results: Path) -> None:
    text = page.read_text()
    parsed = Page()
    parsed.feed(text)
    assert parsed.open == []
    assert all(link.startswith("#") and link[1:] in parsed.ids for link in parsed.fetched)
    assert parsed.tags.count("img") == 8
    assert parsed.tags.count("table") == len(list(tables(everything())))
    assert "<title>A &amp; B</title>" in text
    assert "script" not in parsed.tags
    assert not re.search(r"@import|url\(", text)


def test_the_page_says_how_each_part_is_made_again(page: Path, results: Path) -> None:
    text = page.read_text()
    assert f"msrnn plot {results} -o figures --figure words" in text
    assert "msrnn eval experiments/some.toml" in text
    assert "commit abc1234" in text
    assert "torch 2" in text
    assert f"msrnn report {results} -o report.html" in text


@pytest.mark.slow
def test_a_browser_shows_the_page(page: Path, tmp_path: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("there is no chromium here; the page is parsed in the tests before this one")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--window-size=1250,3000"]
    check = (
        "<script>addEventListener('load',()=>{const p=[...document.images];document.title='seen '+"
        "p.filter(i=>i.complete&&i.naturalWidth>300).length+' of '+p.length+' wide '+"
        "(document.documentElement.scrollWidth<=innerWidth)})</script></body>"
    )
    copy = tmp_path / "checked.html"
    copy.write_text(page.read_text().replace("</body>", check))
    command = [browser, *options, "--host-resolver-rules=MAP * 0.0.0.0", "--dump-dom", copy.as_uri()]
    browser_run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "<title>seen 8 of 8 wide true</title>" in browser_run.stdout, browser_run.stderr[-500:]


def test_markdown_is_printed(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(results), "--markdown"]) == 0
    output = capsys.readouterr().out
    assert "| tova, paper | 9.53 |" in output
    assert main(["report", str(results), "--markdown", "-o", "x.html"]) == 2


def test_the_folder_results_need_not_be_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["report"], ["plot", "-o", "figures"]):
        assert main(command) == 2
        assert "there is no file results" in capsys.readouterr().err
    (tmp_path / "results").mkdir()
    write_records(tmp_path / "results" / "pg19.jsonl", pg19())
    assert main(["report"]) == 0
    assert "PG-19 perplexity by capacity" in (tmp_path / "report.html").read_text()
    assert main(["plot", "-o", "figures", "--figure", "perplexity"]) == 0
    assert (tmp_path / "figures" / "perplexity.png").exists()


def test_empty_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.jsonl").touch()
    assert main(["report", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "r.html")]) == 2
    assert "nothing to report" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
