"""Every page of the documentation: its links lead somewhere, its commands parse, the files it names exist."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

import msrnn
from msrnn.cli import parser
from tests.docs import pages
from tests.support import tiny_eval

SOURCE = pages.ROOT / "src" / "msrnn"
SECTIONS = "core|kernels|hf|engine|vllm|budgets|eval|analysis|bench|cli|play|rules|system"


@pytest.mark.parametrize("name", pages.NAMES)
def test_links_lead_somewhere(name: str) -> None:
    folder = (pages.ROOT / name).parent
    for link in pages.links(name):
        file, _, anchor = link.partition("#")
        target = (folder / file).resolve() if file else pages.ROOT / name
        assert target.exists(), f"{name} links to {link}"
        if anchor:
            page = target.relative_to(pages.ROOT).as_posix()
            assert anchor in pages.anchors(page), f"{name} links to {link}"


@pytest.mark.parametrize("name", pages.NAMES)
def test_no_link_leads_to_where_it_stands(name: str) -> None:
    assert not pages.links_to_their_own_section(name)


def test_anchors_are_those_of_github() -> None:
    assert {"results", "what-is-lost-and-what-is-gained"} <= pages.anchors("README.md") | pages.anchors(
        "docs/results.md"
    )
    assert "a-policy-between-tova-and-h2o-fade" in pages.anchors("docs/budgets.md")


@pytest.mark.parametrize("name,line", [(name, line) for name in pages.NAMES for line in pages.commands(name)])
def test_commands_are_understood(name: str, line: str) -> None:
    parser().parse_args(shlex.split(line, comments=True)[1:])


def test_there_are_commands_to_check() -> None:
    assert {name for name in pages.NAMES if pages.commands(name)} >= {
        "README.md",
        "docs/evaluation.md",
        "docs/serving.md",
    }


@pytest.mark.parametrize("name", pages.NAMES)
def test_named_files_exist(name: str) -> None:
    spans = re.findall(r"`([^`\n]+)`", pages.prose(name))
    paths = [span for span in spans if re.fullmatch(r"[\w./-]+", span) and "/" in span]
    for path in paths:
        if re.match(r"(tests|benchmarks|results|experiments|src|docs)/", path) and not _is_new(path):
            assert (pages.ROOT / path).exists(), f"{name} names {path}"
        elif re.match(rf"({SECTIONS})/", path):
            assert (SOURCE / path).exists() or (pages.ROOT / path).exists(), f"{name} names {path}"


def _is_new(path: str) -> bool:
    """What a reader is to write, or stands for any name."""
    return Path(path).stem in ("endings", "value_norm", "NAME")


def test_the_engine_page_lists_its_options() -> None:
    _, *rows = pages.tables("docs/engine.md", "Options")[0]
    assert {row[0].strip("`") for row in rows} == {field.name for field in fields(msrnn.EngineOptions)}


def test_the_engine_page_runs(capsys) -> None:
    names = {
        "msrnn": msrnn,
        "model": tiny_eval.model(),
        "tokenizer": tiny_eval.tokenizer(),
        "prompts": [[5, 6, 7], [8, 9]],
    }
    for block in pages.blocks("docs/engine.md", "python"):
        exec(compile(block, "docs/engine.md", "exec"), names)
    assert sorted(line[0] for line in capsys.readouterr().out.splitlines() if line[:2] in ("0 ", "1 ")) == ["0", "1"]
