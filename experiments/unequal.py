"""Do layers or KV heads of unequal capacity cost speed? A decode step with the same total of slots, equal or not.

    python experiments/unequal.py --shape llama-2-7b --average 512 --batch 1 --batch 48 --batch 384

The profile's capacities are those that ship for SmolLM2-135M-Instruct, stretched over the layers of the shape and
scaled to the same total; by KV head, where heads decide alone, the heads of a layer have 0.4 to 1.6 of its capacity.
One CUDA graph holds all layers either way; shapes stay static within each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from msrnn.bench.decode import step_or_none
from msrnn.bench.shapes import make
from msrnn.budgets.profile import read_profile
from msrnn.eval.record import append_lines
from msrnn.policy import parse_policy, split_policy
from msrnn.system import provenance


def stretched(layers: int, average: int) -> list[int]:
    """Capacities for so many layers with the spread of the shipped profile and exactly this average."""
    shipped = read_profile("SmolLM2-135M-Instruct", 256)
    sizes = [shipped[layer * len(shipped) // layers] for layer in range(layers)]
    scaled = [max(16, round(size * average * layers / sum(sizes))) for size in sizes]
    scaled[scaled.index(max(scaled))] += average * layers - sum(scaled)
    return scaled


def spread(size: int, kv_heads: int) -> list[int]:
    """Capacities of so many KV heads from 0.4 to 1.6 of `size`, which is their average."""
    heads = [round(size * (0.4 + 1.2 * head / max(kv_heads - 1, 1))) for head in range(kv_heads)]
    heads[-1] += size * kv_heads - sum(heads)
    return heads


def profiles(model: PreTrainedModel, average: int, folder: Path) -> dict[str, Path]:
    """Files with unequal capacities: by layer, and by KV head."""
    layers = stretched(model.config.num_hidden_layers, average)
    contents = {"by layer": layers, "by KV head": [spread(size, model.config.num_key_value_heads) for size in layers]}
    files = {name: folder / f"{name.split()[-1]}.json" for name in contents}
    for name, file in files.items():
        file.write_text(json.dumps({"capacities": contents[name], "average": average}))
    return files


def measure(
    arguments: argparse.Namespace, model: PreTrainedModel, kind: str, batch: int, files: dict[str, Path]
) -> None:
    plain = split_policy(kind).with_size(arguments.average)
    together = parse_policy(plain).scope == "layer"
    named = {name: file for name, file in files.items() if name in arguments.capacities}
    policies = {"equal": plain} | {
        name: f"{plain},profile={file}" for name, file in named.items() if not (together and name == "by KV head")
    }
    equal = None
    for name, policy in policies.items():
        row = step_or_none(model, policy, batch, arguments.context, runs=arguments.runs)
        if row is None:
            print(f"{plain}, batch {batch}: {name} does not fit", flush=True)
            return
        equal = equal or row["median_s"]
        time = f"{row['median_s'] * 1e3:.3f} ms ({row['median_s'] / equal:.3f})"
        print(f"{plain}, batch {batch}: {name} {time}", flush=True)
        if arguments.out:
            append_lines(arguments.out, [row | about(arguments) | {"capacities": name}])


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """The conditions of a record."""
    machine = provenance.machine(torch.device(arguments.device))
    place = {"machine": machine, "date": provenance.now(), "versions": provenance.versions()}
    return place | {"shape": arguments.shape, "commit": provenance.commit(), "command": provenance.command()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--average", type=int, default=512)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--kind", action="append", help="default: tova, fade")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--capacities", nargs="+", default=["by layer", "by KV head"], help="beside equal ones")
    parser.add_argument("--runs", type=int, default=5, help="whose median counts")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = make(arguments.shape, torch.bfloat16 if arguments.device == "cuda" else torch.float32, arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        files = profiles(model, arguments.average, Path(folder))
        for kind in arguments.kind or ("tova", "fade"):
            for batch in arguments.batch or (1, 48):
                measure(arguments, model, kind, batch, files)


if __name__ == "__main__":
    main()
