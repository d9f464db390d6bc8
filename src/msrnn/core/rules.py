"""Research policies: a rule is one file with a function `score(view)`, in plain PyTorch, exact on every path.

A rule sees what the definition knows of one step. It gives every column a score, and the free column with the lowest
score leaves. With a momentum, a share of each old score is added. A rule that needs more of the past than a score has
`MEMORY = F` and also returns F numbers to store with every column. `msrnn/rules/` has one file per rule; a path to a
file of your own works as well: `./my_rule.py:256`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..policy import Policy

log = logging.getLogger("msrnn")
FOLDER = Path(__file__).parents[1] / "rules"
_MOST_MEMORY = 4096  # numbers per slot


@dataclass(frozen=True)
class View:
    """One step of U units, each with M query heads and K KV heads, over N columns.

    weights [B, U, M, N]: this step's attention weights, 0 where a column is not visible. keys [B, U, K, N, D],
    values [B, U, K, N, V], positions [B, U, N] (-1: empty), visible [B, U, N], now [B, 1, 1]: the position of the new
    token. scores [B, U, N]: each column's score after the last step, 0 for the new token. memory [B, U, N, F]: the F
    numbers that the rule last stored with each column, 0 for the new token; F is the rule's MEMORY. All numbers are
    in float32 or better.
    """

    weights: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    visible: Tensor
    now: Tensor
    scores: Tensor
    memory: Tensor
    policy: Policy


@dataclass(frozen=True)
class Rule:
    """`score(view)` -> scores [B, U, N], and with a `memory` size F also the numbers to store, [B, U, N, F]."""

    score: Callable[[View], Tensor | tuple[Tensor, Tensor]]
    memory: int = 0

    def __call__(self, view: View) -> tuple[Tensor, Tensor]:
        """The scores after this step (what momentum leaves of the old ones, and the rule's), and the memory."""
        result = self.score(view)
        if isinstance(result, tuple) != bool(self.memory):
            expected = "scores and memory" if self.memory else "scores alone"
            raise ValueError(f"rule {view.policy.rule} has MEMORY = {self.memory}, so it must give {expected}")
        new, memory = result if isinstance(result, tuple) else (result, view.memory)
        for name, ours, like in (("scores", new, view.scores), ("memory", memory, view.memory)):
            if ours.shape != like.shape:
                shapes = f"{tuple(ours.shape)}; they must be {tuple(like.shape)}"
                raise ValueError(f"rule {view.policy.rule} gave {name} {shapes}")
        return view.policy.momentum * view.scores + new.to(view.scores.dtype), memory.to(view.memory.dtype)


def score_by_rule(
    policy: Policy, weights: Tensor, keys: Tensor, values: Tensor, positions: Tensor, visible: Tensor, now: Tensor,
    scores: Tensor, memory: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """weights [B, H, N], keys [B, G, N, D], values [B, G, N, V] -> scores [B, U, N], memory [B, U, N, F]."""
    batch, units = positions.shape[:2]
    weights, keys, values = (rows.reshape(batch, units, -1, *rows.shape[2:]) for rows in (weights, keys, values))
    rule = load_rule(policy.rule or "")
    memory = scores.new_zeros(*scores.shape, rule.memory) if memory is None else memory
    return rule(View(weights, keys, values, positions, visible, now, scores, memory, policy))


def memory_size(policy: Policy) -> int:
    """How many numbers of its own a policy's rule stores with each slot of a unit."""
    return 0 if policy.rule is None else load_rule(policy.rule).memory


@cache
def load_rule(name: str) -> Rule:
    """A rule, by the name of a file in msrnn/rules/ or by a path."""
    path = Path(name) if name.endswith(".py") else FOLDER / f"{name}.py"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("[!_]*.py")))
        raise ValueError(f"there is no rule {name!r}; msrnn has: {known}; or give a path such as ./my_rule.py")
    module = _import(path)
    score, memory = getattr(module, "score", None), getattr(module, "MEMORY", 0)
    if score is None:
        raise ValueError(f"{path} has no function score(view); see msrnn/rules/ for examples")
    if not isinstance(memory, int) or not 0 <= memory <= _MOST_MEMORY:
        raise ValueError(f"{path} has MEMORY = {memory!r}; it must be a whole number from 0 to {_MOST_MEMORY}")
    return Rule(torch.no_grad()(score), memory)


@cache
def announce_rule(name: str) -> None:
    """Say once that a rule has no kernel; a rule that cannot be loaded is refused here."""
    load_rule(name)
    log.warning("msrnn: %s has no kernel yet: it runs in plain PyTorch, exact but slow", name)


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"msrnn_rule_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"rule {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
