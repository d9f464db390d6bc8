"""The arrows: a module of msrnn imports only from modules above it in this list."""

import ast
from pathlib import Path

import pytest

import msrnn

ROOT = Path(msrnn.__file__).parent

# A name stands for itself and everything below it, unless a longer name in the list says more.
ORDER = (
    "allocate",
    "policy",
    "bound",
    "profile",
    "scratch",
    "attention",
    "state",
    "reference",
    "ops.eager",
    "ops.cpu",
    "ops.cpu_rows",
    "ops.eager_step",
    "ops.beside",
    "ops.gpu_kernels",
    "ops.team",
    "ops.cpu_step",
    "ops.gpu",
    "ops.gpu_rows",
    "ops.gpu_step_kernels",
    "ops.gpu_step",
    "ops",
    "columns",
    "quick",
    "recurrence",
    "files",
    "machine",
    "trace",
    "adapters",
    "wheels",
    "models",
    "memory",
    "rnn",
    "adapters.vllm.prefix",
    "adapters.vllm.connector",
    "sampling",
    "fused",
    "joined",
    "wavefront",
    "engine",
    "bench",
    "perplexity",
    "text",
    "eval",
    "analysis",
    "adapters.lm_eval",
    "ledger",
    "calibrate",
    "advise",
    "__init__",
    "demo",
    "cli",
    "__main__",
)

FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_imports_point_up(file: Path):
    here = place(name(file))
    assert here is not None, f"put {name(file)} into ORDER, below all it imports"
    low = [target for target in imports(file) if place(target) not in range(here + 1)]
    assert not low, f"{name(file)} imports {low}, which do not stand above it in ORDER"


@pytest.mark.parametrize(
    "line, target",
    [
        ("import msrnn.cli", "cli"),
        ("from msrnn import cli", "cli"),
        ("from msrnn.cli import main", "cli"),
        ("from . import cli", "cli"),
        ("from .ops.cpu import scan", "ops.cpu"),
        ("from .ops import cpu", "ops.cpu"),
        ("from msrnn import Policy", "__init__"),
        ("def late():\n    from .cli import main", "cli"),
    ],
)
def test_every_form_of_import_is_seen(tmp_path, monkeypatch, line, target):
    (tmp_path / "ops").mkdir()
    for other in ("__init__", "cli", "ops/__init__", "ops/cpu"):
        (tmp_path / f"{other}.py").touch()
    file = tmp_path / "policy.py"
    file.write_text(line)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert imports(file) == {target}


def name(file: Path) -> str:
    """The name inside msrnn: `ops.cpu` for ops/cpu.py, `ops` for ops/__init__.py."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def place(module: str) -> int | None:
    """Where the module stands in ORDER; the longest name that covers it counts."""
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((ORDER.index(prefix) for prefix in prefixes if prefix in ORDER), None)


def imports(file: Path) -> set[str]:
    """The msrnn modules that a file imports, anywhere in it."""
    package = ["msrnn", *file.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {module(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            base = start + (node.module.split(".") if node.module else [])
            found |= {module([*base, alias.name]) for alias in node.names}
    return {target for target in found if target is not None}


def module(parts: list[str]) -> str | None:
    """The longest part of a dotted name that is a module of msrnn; None for other packages."""
    if parts[0] != "msrnn":
        return None
    for n in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[1:n])
        if path.is_dir() or path.with_suffix(".py").is_file():
            return ".".join(parts[1:n])
    return "__init__"
