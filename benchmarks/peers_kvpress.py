"""kvpress's policies on the jobs of benchmarks/peers.py; run by the python of .venv-kvpress, knows nothing of msrnn.

A press sees the whole prompt, the question too, with full attention, and then keeps `capacity` tokens of every KV head.
What comes after the prompt is added to them, as kvpress does by default.
"""

from importlib.metadata import version

from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from peers_work import serve
from transformers import DynamicCache

PRESSES = {
    "kvpress TOVA": TOVAPress,
    "kvpress SnapKV": SnapKVPress,
    "kvpress KeyDiff": KeyDiffPress,
    "kvpress expected attention": ExpectedAttentionPress,
    "kvpress knorm": KnormPress,
    "kvpress streaming": StreamingLLMPress,
}


def pressed(press):
    def run(model, length, capacity):
        ratio = max(0.0, 1 - (capacity + 0.5) / length)  # kvpress keeps int(length * (1 - ratio))
        return DynamicCache(), press(compression_ratio=ratio)(model)

    return run


RUNS = {name: pressed(press) for name, press in PRESSES.items()}

if __name__ == "__main__":
    serve(RUNS, {name: version(name) for name in ("kvpress", "transformers", "torch")})
