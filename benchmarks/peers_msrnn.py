"""msrnn's policies, and the caches of transformers itself, on the jobs of benchmarks/peers.py.

transformers' quantised caches hold all tokens, in 4 or 2 bits, and the newest 128 as they are. quanto would build
an extension with a compiler at its first use; here codes are unpacked with PyTorch: its numbers are the same, its steps
may be slower than with the extension.
"""

from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace

import torch
from peers_work import STEPS, clock, peak, reset_peak, serve
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

import msrnn

POLICIES = ("tova", "fade", "h2o", "window+4", "best")
ROOM = 192  # new tokens that a static cache has room for


def bounded(policy):
    return lambda model, length, capacity: (msrnn.cache(model, f"{policy}:{capacity}"), nullcontext())


def quantised(bits):
    def run(model, length, capacity):
        cache = QuantizedCache("quanto", model.config, nbits=bits)
        from optimum.quanto.library.extensions import get_extension

        get_extension(f"quanto_{'cuda' if model.device.type == 'cuda' else 'cpp'}")._lib = SimpleNamespace(
            unpack=unpack
        )
        return cache, nullcontext()

    return run


def unpack(packed, bits):
    """Codes of `bits` from bytes, the lowest bits of all bytes first, as quanto packs them."""
    return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])


def sliding(model, length, capacity):
    """transformers' sliding layers: the newest tokens only, and no attention sink."""
    layers = [DynamicSlidingWindowLayer(sliding_window=capacity) for _ in range(model.config.num_hidden_layers)]
    return Cache(layers=layers), nullcontext()


def engine(policy):
    """msrnn's engine, with pipelined prefill; the second of two runs counts, as the first captures CUDA graphs."""

    def run(model, capacity, job):
        before = reset_peak(model)
        options = msrnn.EngineOptions(pipelined_prefill=True, fused_projections=False)  # the weights of the other runs
        engine = msrnn.Engine(model, f"{policy}:{capacity}", batch=len(job["rows"]), options=options)
        for _ in range(2):
            start = clock(model)
            engine.generate(job["rows"], max_new_tokens=1, stops=())
            read = clock(model)
            engine.generate(job["rows"], max_new_tokens=STEPS, stops=())
            end = clock(model)
        prefill, step = read - start, (end - read - (read - start)) / (STEPS - 1)
        return {"prefill_s": prefill, "step_s": step, "peak_bytes": peak(model) - before}

    return run


RUNS = {f"msrnn {policy}": bounded(policy) for policy in POLICIES}
RUNS["transformers full"] = lambda model, length, capacity: (DynamicCache(config=model.config), nullcontext())
RUNS["transformers static"] = lambda model, length, capacity: (
    StaticCache(config=model.config, max_cache_len=length + ROOM),
    nullcontext(),
)
RUNS["transformers sliding"] = sliding
RUNS["transformers quantised, 4 bits"] = quantised(4)
RUNS["transformers quantised, 2 bits"] = quantised(2)
TIMED = {"msrnn engine tova": engine("tova"), "msrnn engine best": engine("best")}

if __name__ == "__main__":
    serve(RUNS, {"msrnn": msrnn.__version__} | {name: version(name) for name in ("transformers", "torch")}, TIMED)
