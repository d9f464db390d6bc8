"""State files: a state of another policy is refused with the layer in which the policies differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import msrnn


def test_the_first_layer_that_differs_is_named(llama: Any, tmp_path: Path) -> None:
    model, path = llama(num_hidden_layers=30), tmp_path / "state"
    sizes = [20] * 28 + [18, 20]
    rnn = msrnn.RNN(model, msrnn.per_layer("tova", sizes))
    _, state = rnn.step(torch.arange(30)[None], rnn.start())
    state.save(path)
    for other, reason in (
        (msrnn.per_layer("tova", [*sizes[:28], 22, 30]), "another policy: layer 28 had tova:18, not tova:22$"),
        ("tova:20", "another policy: layer 28 had tova:18, not tova:20$"),
        ("h2o:20", "another policy: layer 0 had tova:20, not h2o:20$"),
    ):
        with pytest.raises(msrnn.StateError, match=reason):
            msrnn.RNN(model, other).load(path)
