"""Peak memory of prefill for texts of any length: the whole model, one process and one JSON line per run.

python benchmarks/memory.py --policy tova:256 --policy full --length 4096 --length 32768

`peak` is how far the process's memory rose above the loaded model during prefill in pieces (cache, activations, and the
logits of one token); `state` is the size of the cache at the end. Memory does not depend on the ids.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import islice

import torch

import msrnn
from msrnn.rnn import PIECE
from msrnn.system.memory import Peak


def ids(length: int, vocabulary: int) -> list[int]:
    return [(i * i + 7 * i // 3) % vocabulary for i in range(length)]


def measure(model_name: str | None, policy: str, length: int, piece: int) -> dict[str, object]:
    model, _ = msrnn.load(model_name)
    rnn = msrnn.RNN(model, policy, piece=piece)
    text = ids(length, model.config.vocab_size)
    rnn.read(islice(text, 64), rnn.start())  # libraries are loaded and kernels compiled before the measurement
    with Peak(model.device) as peak:
        started = time.perf_counter()
        _, state = rnn.read(text, rnn.start())
        seconds = time.perf_counter() - started
    record = {"policy": policy, "length": length, "piece": piece, "peak": peak.bytes, "state": state.nbytes}
    conditions = {"dtype": str(model.dtype), "device": str(model.device), "threads": torch.get_num_threads()}
    return record | {"seconds": round(seconds, 1)} | conditions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--length", action="append", type=int)
    parser.add_argument("--piece", type=int, default=PIECE)
    options = parser.parse_args()
    runs = [(policy, n) for policy in options.policy or ["tova:256"] for n in options.length or [4096, 32768]]
    if len(runs) == 1:
        print(json.dumps(measure(options.model, *runs[0], options.piece)), flush=True)
        return
    for policy, length in runs:
        arguments = ["--policy", policy, "--length", str(length), "--piece", str(options.piece)]
        model = ["--model", options.model] if options.model else []
        subprocess.run([sys.executable, __file__, *arguments, *model], check=True)


if __name__ == "__main__":
    main()
