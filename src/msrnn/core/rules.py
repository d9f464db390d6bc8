"""Research policies: a rule is one file with a function `score(view)`, in plain PyTorch, exact on every path.

A rule sees what the definition knows of one step. It gives every column a score, and the free column with the lowest
score leaves. `msrnn/rules/` has one file per rule; a path to a file of your own works as well: `./my_rule.py:256`.
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


@dataclass(frozen=True)
class View:
    """One step of U units, each with M query heads and K KV heads, over N columns.

    weights [B, U, M, N]: this step's attention weights, 0 where a column is not visible. keys [B, U, K, N, D],
    values [B, U, K, N, V], positions [B, U, N] (-1: empty), visible [B, U, N], now [B, 1, 1]: the position of the new
    token. scores [B, U, N]: what this rule gave each column after the last step, 0 for the new token. All
    numbers are in float32 or better.
    """

    weights: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    visible: Tensor
    now: Tensor
    scores: Tensor
    policy: Policy


Rule = Callable[[View], Tensor]


def score_by_rule(
    policy: Policy, weights: Tensor, keys: Tensor, values: Tensor, positions: Tensor, visible: Tensor, now: Tensor,
    scores: Tensor,
) -> Tensor:  # fmt: skip
    """weights [B, H, N], keys [B, G, N, D], values [B, G, N, V] -> [B, U, N]: the rule's scores after this step."""
    batch, units = positions.shape[:2]
    weights, keys, values = (rows.reshape(batch, units, -1, *rows.shape[2:]) for rows in (weights, keys, values))
    score = load_rule(policy.rule or "")(View(weights, keys, values, positions, visible, now, scores, policy))
    if score.shape != positions.shape:
        raise ValueError(f"rule {policy.rule} gave scores {tuple(score.shape)}; they must be {tuple(positions.shape)}")
    return score.to(scores.dtype)


@cache
def load_rule(name: str) -> Rule:
    """The `score` function of a rule, by the name of a file in msrnn/rules/ or by a path."""
    path = Path(name) if name.endswith(".py") else FOLDER / f"{name}.py"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("[!_]*.py")))
        raise ValueError(f"there is no rule {name!r}; msrnn has: {known}; or give a path such as ./my_rule.py")
    score: Rule | None = getattr(_import(path), "score", None)
    if score is None:
        raise ValueError(f"{path} has no function score(view); see msrnn/rules/ for examples")
    return torch.no_grad()(score)


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
