"""Which module may import which: six layers, and a few rules about frameworks and private names."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import msrnn

ROOT = Path(msrnn.__file__).parent

# A module imports only from its own layer and those above it. The longest name that matches a module counts.
LAYERS = (
    ("system", "policy", "plan", "budgets.profile", "budgets.allocate"),  # words, numbers and files
    ("core", "kernels", "rules"),  # the recurrence
    ("hf", "rnn", "state_file"),  # models
    ("engine", "vllm", "eval", "budgets"),  # uses of a bounded model
    ("analysis", "bench"),  # measurements
    ("cli", "play", "__main__", "__init__"),  # what people touch
)
# Frameworks are leaves: only these packages import them.
FRAMEWORKS = {
    "transformers": ("hf", "rnn", "engine", "vllm", "eval", "budgets", "bench", "analysis", "cli", "play"),
    "vllm": ("vllm",),
    "lm_eval": ("eval.lm_eval",),
    "numba": ("kernels.numba",),
    "triton": ("kernels.triton",),
    "matplotlib": ("analysis",),
}
# Notebook displays are found from the objects they show, when they are shown.
DISPLAYS = {("core.trace", "play.display"), ("hf.cache", "play.display")}
FILES = sorted(ROOT.rglob("*.py"))


def name_of(file: Path) -> str:
    """`core.slots` for core/slots.py, `core` for core/__init__.py."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(file): file for file in FILES}


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((level for prefix in prefixes for level, names in enumerate(LAYERS) if prefix in names), None)


def imports(file: Path, *, typing_only: bool = True) -> set[tuple[str, ...]]:
    """Every imported name as a tuple: ("msrnn", "core", "slots", "Slots") or ("torch", "nn")."""
    package = ("msrnn", *file.relative_to(ROOT).parent.parts)
    tree, targets = ast.parse(file.read_text()), set()
    for node in _without_typing(tree) if not typing_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            targets |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else ()
            base = (*start, *(node.module.split(".") if node.module else ()))
            targets |= {(*base, alias.name) for alias in node.names}
    return targets


def _without_typing(tree: ast.AST) -> list[ast.AST]:
    """The nodes of module level that run at import: not inside functions, nor under `if TYPE_CHECKING`."""
    nodes: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes += [node, *_without_typing(node)]
    return nodes


def module_in(target: tuple[str, ...]) -> str | None:
    """The module of msrnn that an imported name lives in; None for other packages."""
    if target[0] != "msrnn":
        return None
    names = (".".join(target[1:n]) for n in range(len(target), 1, -1))
    return next((name for name in names if name in MODULES), "__init__")


@pytest.mark.parametrize("module", MODULES)
def test_layers(module: str) -> None:
    level = layer_of(module)
    assert level is not None, f"{module} is in no layer: put its package into LAYERS"
    below = {target for target in map(module_in, imports(MODULES[module])) if target}
    wrong = sorted(t for t in below if layer_of(t) not in range(level + 1) and (module, t) not in DISPLAYS)
    assert not wrong, f"{module} (layer {level}) imports {wrong} from a layer below it"


def test_no_cycles() -> None:
    """Among modules that import each other when they are imported."""
    graph = {}
    for module, file in MODULES.items():
        targets = {module_in(target) for target in imports(file, typing_only=False)}
        graph[module] = {target for target in targets if target and target != module}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(MODULES)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frameworks_are_leaves(framework: str) -> None:
    allowed = FRAMEWORKS[framework]
    users = {module for module, file in MODULES.items() if any(t[0] == framework for t in imports(file))}
    wrong = sorted(module for module in users if not any(f"{module}.".startswith(f"{name}.") for name in allowed))
    assert users, f"nobody imports {framework}: is its name still right?"
    assert not wrong, f"{wrong} import {framework}, which only {', '.join(allowed)} may"


@pytest.mark.parametrize("compiler", ["numba", "triton"])
def test_compiled_kernels_are_chosen_in_one_place(compiler: str) -> None:
    """`kernels/__init__.py` picks them; nobody else names them."""
    package = ("msrnn", "kernels", compiler)
    users = {module for module, file in MODULES.items() if any(t[:3] == package for t in imports(file))}
    wrong = sorted(module for module in users if not f"{module}.".startswith("kernels."))
    assert "kernels" in users
    assert not wrong, f"{wrong} import msrnn.kernels.{compiler}; call msrnn.kernels instead"


@pytest.mark.parametrize("module", MODULES)
def test_private_names_stay_private(module: str) -> None:
    """No name with a leading underscore of another module, imported or through the module."""
    tree = ast.parse(MODULES[module].read_text())
    private = [".".join(t) for t in imports(MODULES[module]) if t[0] == "msrnn" and _is_private(t[-1])]
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if module_in(_resolve(module, node, alias.name)) != module_in(_resolve(module, node, ""))
    }
    for node in ast.walk(tree):
        through = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
        if through and _is_private(node.attr):
            private.append(f"{node.value.id}.{node.attr}")
    assert not private, f"{module} uses {private}"


def _resolve(module: str, node: ast.ImportFrom, name: str) -> tuple[str, ...]:
    package = ("msrnn", *MODULES[module].relative_to(ROOT).parent.parts)
    start = package[: len(package) + 1 - node.level]
    return (*start, *(node.module.split(".") if node.module else ()), name)


@pytest.mark.parametrize(
    "line, target",
    [
        ("import msrnn.cli", "cli"),
        ("from msrnn.cli import main", "cli"),
        ("from .. import kernels", "kernels"),
        ("from ..kernels.numba import scan", "kernels.numba.scan"),
        ("from msrnn import Policy", "__init__"),
        ("def late():\n    from ..cli import main", "cli"),
    ],
)
def test_every_form_of_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, target: str) -> None:
    file = tmp_path / "core" / "probe.py"
    file.parent.mkdir()
    file.write_text(line)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert {module_in(name) for name in imports(file)} == {target}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")
