"""A trace: the step after which each token left, per layer and unit. Everything else is a function of it.

Deaths are int32 [B, U, T] per layer, `ALIVE` for tokens still held. Saved as safetensors, never pickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..system.files import load_tensors, save_tensors
from .slots import NEVER

ALIVE = torch.iinfo(torch.int32).max
_KIND = "msrnn trace 1"


@dataclass
class Recorder:
    """Collects one layer's evictions as the recurrence reports them."""

    deaths: Tensor | None = None  # [B, U, room], grows by doubling
    length: int = 0

    def __call__(self, positions: Tensor, expiry: Tensor) -> None:
        positions, expiry = positions.cpu(), expiry.cpu()
        self.length = max(self.length, int(positions.max()) + 1)
        if self.deaths is None:
            self.deaths = torch.full((*positions.shape[:2], 0), ALIVE, dtype=torch.int32)
        room = self.deaths.shape[2]
        if self.length > room:
            self.deaths = pad(self.deaths, (0, max(self.length - room, room)), value=ALIVE)
        batch, unit, column = ((positions >= 0) & (expiry != NEVER)).nonzero(as_tuple=True)
        when = expiry[batch, unit, column].to(torch.int32)
        self.deaths[batch, unit, positions[batch, unit, column]] = when

    def select(self, index: Tensor) -> None:
        """Beams were reordered, or rows repeated: row i is what row index[i] was."""
        self.deaths = None if self.deaths is None else self.deaths.index_select(0, index.cpu())


@dataclass
class Trace:
    """`deaths[l]` is [B, U, T]; `tokens` the ids read, [B, T], where they are known."""

    deaths: list[Tensor]
    policy: str
    model: str = ""
    tokens: Tensor | None = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return max((layer.shape[2] for layer in self.deaths), default=0)

    def held(self, layer: int, step: int) -> Tensor:
        """[B, U, T]: which tokens are in the state after `step`."""
        deaths = self.deaths[layer]
        return (torch.arange(deaths.shape[2]) <= step) & (deaths > step)

    def ages(self, layer: int) -> Tensor:
        """[B, U, T]: how many steps each token stayed, counted to the end of the trace for those still held."""
        deaths = self.deaths[layer].clamp(max=self.length - 1)
        return deaths - torch.arange(deaths.shape[2])

    def _repr_html_(self) -> str:
        """The layer-by-token map, for notebooks."""
        from ..play.display import trace_html

        return trace_html(self)

    def save(self, path: str | Path) -> None:
        tensors = {f"layer.{i}": layer.contiguous() for i, layer in enumerate(self.deaths)}
        if self.tokens is not None:
            tensors["tokens"] = self.tokens.contiguous()
        about = {"kind": _KIND, "policy": self.policy, "model": self.model, "notes": json.dumps(self.notes)}
        save_tensors(path, tensors, about)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        try:
            about, tensors = load_tensors(path)
        except ValueError as error:
            raise ValueError(f"{path} is not a trace: {error}") from error
        if about.get("kind") != _KIND:
            raise ValueError(f"{path} is not a trace of this version of msrnn; make one with `msrnn trace`")
        tokens = tensors.pop("tokens", None)
        message = _fault(about, tensors, tokens)
        if message is not None:
            raise ValueError(f"{path} is not a trace: {message}; make one with `msrnn trace`")
        deaths = [tensors[f"layer.{i}"] for i in range(len(tensors))]
        return cls(deaths, about["policy"], about["model"], tokens, json.loads(about["notes"]))


def _fault(about: dict[str, str], layers: dict[str, Tensor], tokens: Tensor | None) -> str | None:
    """What is wrong with the contents of a file, in words; None if nothing is."""
    if not {"policy", "model", "notes"} <= about.keys() or not _is_notes(about["notes"]):
        return "its policy, model or notes are missing"
    if not layers or layers.keys() != {f"layer.{i}" for i in range(len(layers))}:
        return f"its layers are {', '.join(sorted(layers)[:3])} ..."
    batch, _, length = layers["layer.0"].shape if layers["layer.0"].ndim == 3 else (0, 0, 0)
    for name, deaths in layers.items():
        if deaths.dtype != torch.int32 or deaths.ndim != 3 or (deaths.shape[0], deaths.shape[2]) != (batch, length):
            return f"{name} is {deaths.dtype} {list(deaths.shape)}, not int32 [{batch}, units, {length}]"
        inside = (deaths >= torch.arange(length)) & ((deaths < length) | (deaths == ALIVE))
        if 0 in deaths.shape or not bool(inside.all()):
            return f"in {name} a token leaves before it comes, or after the end"
    if tokens is not None and (tokens.ndim != 2 or len(tokens) != batch or tokens.is_floating_point()):
        return f"its tokens are {tokens.dtype} {list(tokens.shape)}"
    return None


def _is_notes(text: str) -> bool:
    try:
        notes = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())
