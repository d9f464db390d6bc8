"""The walk-throughs of CONTRIBUTING work: their code is run as it is printed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import msrnn
import msrnn.cli as cli
from msrnn.eval import tasks
from tests.docs import pages
from tests.hf import test_models
from tests.support import tiny_eval
from tests.support.models import tiny_llama

PAGE = "CONTRIBUTING.md"


def block(start: str) -> str:
    """The one code block that begins so."""
    (found,) = [body for body in pages.blocks(PAGE, "python") if body.strip().startswith(start)]
    return found


def add_module(monkeypatch: pytest.MonkeyPatch, name: str, path: Path, code: str) -> object:
    """Import code as if its file stood in the package."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "any_head.py").write_text(block('"""src/msrnn/rules/any_head.py'))
    monkeypatch.chdir(tmp_path)
    model = tiny_llama().double()
    ids = torch.randint(3, 64, (1, 30), generator=torch.Generator().manual_seed(0))

    def logits(policy: str, size: int) -> torch.Tensor:
        cache = msrnn.cache(model, policy)
        return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(size, 1)], 1)

    rule = logits("./any_head.py:6", 1)
    torch.testing.assert_close(logits("./any_head.py:6", 11), rule)
    assert not torch.allclose(rule, logits("tova:6", 1)), "another score keeps other tokens"


def test_a_model_family(monkeypatch: pytest.MonkeyPatch) -> None:
    family = eval("{" + block('"starcoder2"') + "}")
    assert not family.keys() & test_models.FAMILIES.keys(), "the example is to be a new family"
    monkeypatch.setattr(test_models, "FAMILIES", test_models.FAMILIES | family)
    test_models.test_bounded_equals_the_definition("starcoder2", "tova:6")
    test_models.test_room_for_everything_is_the_plain_model("starcoder2", "sdpa", "tova:64")


def test_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block('"""src/msrnn/eval/tasks/endings.py')
    add_module(monkeypatch, "msrnn.eval.tasks.endings", tmp_path / "endings.py", code)
    monkeypatch.setattr(tasks, "NAMES", (*tasks.NAMES, "endings"))
    step = re.search(r"experiments/endings.toml`: (.*?), and", " ".join(pages.text(PAGE).split()))
    assert step is not None
    (tmp_path / "endings.toml").write_text("\n".join([*re.findall(r"`(.+?)`", step[1]), "length = 200"]))
    data, model = tiny_eval.texts(tmp_path / "data"), tiny_eval.save(tmp_path / "model")
    out = tmp_path / "records.jsonl"
    options = ["--data", str(data), "--model", str(model), "--out", str(out), "--quiet"]
    assert cli.main(["eval", str(tmp_path / "endings.toml"), *options]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["policy"] for record in records} == {"full", "tova:256", "tova:512"}
    assert all(part["tokens"] == 49 for part in records[0]["parts"].values()), "a quarter of 199"


def test_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    command = add_module(monkeypatch, "msrnn.cli.layers", tmp_path / "layers.py", block('"""`msrnn layers`'))
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, command))
    folder = str(tiny_eval.save(tmp_path / "model"))
    assert cli.main(["layers", folder]) == 0
    assert capsys.readouterr().out.splitlines() == ["0 2 8 ", "1 2 8 "]
    assert cli.main(["layers", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("msrnn: error: ")
