"""`msrnn serve` up to the moment vLLM would start, without vLLM."""

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from msrnn.cli import serve
from msrnn.cli.argument_parser import Parser


@pytest.fixture
def served_model(tmp_path: Path) -> Callable[..., str]:
    """A model's configuration, which is all that is looked at."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1000,
        "vocab_size": 32,
        "dtype": "bfloat16",
    }

    def write(**changes: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return str(tmp_path)

    return write


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """The command that vLLM would be started with, and its policy."""
    calls = []
    monkeypatch.setattr(serve, "run_server", lambda command, policy, _: calls.append((command, policy)) or 0)
    monkeypatch.setattr(serve, "find_spec", lambda name: object())
    monkeypatch.setattr("msrnn.vllm.plugin.vllm_version", lambda: "0.32.0")
    own = EntryPoints([EntryPoint("msrnn", "msrnn.vllm:register", "vllm.general_plugins")])
    monkeypatch.setattr("msrnn.vllm.plugin.entry_points", lambda group: own.select(group=group))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return calls


def serve_command(*arguments: str) -> None:
    commands = Parser(prog="msrnn").add_subparsers(parser_class=Parser)
    serve.add(commands)
    parsed = commands.choices["serve"].parse_args(list(arguments))
    parsed.run(parsed)


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stop:
        serve_command(*arguments)
    assert stop.value.code == 0
