"""Do layers of unequal capacity cost speed? A decode step with the same total of slots, equal and by a profile.

    python experiments/unequal.py --shape llama-2-7b --average 512 --batch 1 --batch 48 --batch 384

The profile's capacities are those that ship for SmolLM2-135M-Instruct, stretched over the layers of the shape and
scaled to the same total. One CUDA graph holds all layers either way; shapes stay static within each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from msrnn.bench.decode import step_or_none
from msrnn.bench.shapes import make
from msrnn.budgets.profile import read_profile
from msrnn.eval.record import append_lines
from msrnn.system import provenance


def stretched(layers: int, average: int) -> list[int]:
    """Capacities for so many layers with the spread of the shipped profile and exactly this average."""
    shipped = read_profile("SmolLM2-135M-Instruct", 256)
    sizes = [shipped[layer * len(shipped) // layers] for layer in range(layers)]
    scaled = [max(16, round(size * average * layers / sum(sizes))) for size in sizes]
    scaled[scaled.index(max(scaled))] += average * layers - sum(scaled)
    return scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--average", type=int, default=512)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--kind", action="append", help="default: tova, fade")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = make(arguments.shape, torch.bfloat16 if arguments.device == "cuda" else torch.float32, arguments.device)
    sizes = stretched(model.config.num_hidden_layers, arguments.average)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"capacities": sizes, "average": arguments.average}, file)
        file.flush()
        for kind in arguments.kind or ("tova", "fade"):
            for batch in arguments.batch or (1, 48):
                policies = (f"{kind}:{arguments.average}", f"{kind}:{arguments.average},profile={file.name}")
                rows = [step_or_none(model, policy, batch, arguments.context) for policy in policies]
                if None in rows:
                    print(f"{kind}, batch {batch}: does not fit")
                    continue
                equal, unequal = (row["median_s"] * 1e3 for row in rows if row)
                print(f"{kind}:{arguments.average}, batch {batch}: equal {equal:.3f} ms, "
                      f"{min(sizes)} to {max(sizes)} slots {unequal:.3f} ms, ratio {unequal / equal:.3f}")  # fmt: skip
                if arguments.out:
                    about = {"machine": provenance.machine(torch.device(arguments.device)), "date": provenance.now()}
                    about |= {"shape": arguments.shape, "commit": provenance.commit(), "capacities": sizes}
                    append_lines(arguments.out, [row | about for row in rows if row])


if __name__ == "__main__":
    main()
