"""Whether a profile was made for a model that is not loaded: its files are compared, or else its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from msrnn.hf.best import resolve
from msrnn.hf.identity import ProfileError, check_profile, fits, profile_identity


@pytest.fixture
def folder(llama: Any, tmp_path: Path) -> Path:
    """A model whose files are there, and beside it the profile that was made for it."""
    model = llama()
    model.config.name_or_path = "tiny"
    model.scale = torch.nn.Parameter(torch.tensor(0.25))
    model.save_pretrained(tmp_path / "tiny")
    profile = {"capacities": [4, 8, 12], "model": profile_identity(model)}
    profile["model"]["weights"] |= {"scale": 0.25}  # a weight without dimensions
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    return tmp_path / "tiny"


def test_all_files_are_compared_not_the_name(folder: Path) -> None:
    profile, elsewhere = folder.parent / "profile.json", folder.rename(folder.parent / "elsewhere")
    check_profile(profile, AutoConfig.from_pretrained(elsewhere))
    weights = load_file(elsewhere / "model.safetensors")
    save_file(weights | {"scale": weights["scale"] + 1}, elsewhere / "model.safetensors", {"format": "pt"})
    with pytest.raises(ProfileError, match=r"made for another model, tiny \(other weights\)"):
        check_profile(profile, AutoConfig.from_pretrained(elsewhere))


@pytest.mark.parametrize("files", ["none", "other names"])
def test_the_name_decides_where_no_weight_can_be_compared(folder: Path, files: str) -> None:
    profile, weights = folder.parent / "profile.json", folder / "model.safetensors"
    if files == "none":
        weights.unlink()
    else:
        save_file({f"other.{name}": weight for name, weight in load_file(weights).items()}, weights)
    assert fits(profile, AutoConfig.from_pretrained(folder))
    other = AutoConfig.from_pretrained(folder.rename(folder.parent / "other"))
    assert not fits(profile, other)
    with pytest.raises(ProfileError, match="no weights here to compare, and the name is not other"):
        check_profile(profile, other)


@pytest.mark.parametrize("text", ["tova:8,profile={}", "tova:1MiB,profile={}", "best:16,profile={}"])
def test_wherever_a_policy_is_resolved_its_profile_is_checked(folder: Path, text: str) -> None:
    """By `msrnn info` and vLLM too, which have no loaded model."""
    policy = text.format(folder.parent / "profile.json")
    other = AutoConfig.from_pretrained(folder.rename(folder.parent / "other"))
    (folder.parent / "other" / "model.safetensors").unlink()
    with pytest.raises(ProfileError, match="made for another model"):
        resolve(policy, other)
