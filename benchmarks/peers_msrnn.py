"""msrnn's policies, and the caches of transformers itself, on the jobs of benchmarks/peers.py.

transformers' quantised caches hold all tokens, in 4 or 2 bits, and the newest 128 as they are.
"""

from contextlib import nullcontext
from importlib.metadata import version

from peers_work import serve
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

import msrnn

POLICIES = ("tova", "fade", "h2o", "window+4", "best")
ROOM = 192  # new tokens that a static cache has room for


def bounded(policy):
    return lambda model, length, capacity: (msrnn.cache(model, f"{policy}:{capacity}"), nullcontext())


def quantised(bits):
    return lambda model, length, capacity: (QuantizedCache("quanto", model.config, nbits=bits), nullcontext())


def sliding(model, length, capacity):
    """transformers' sliding layers: the newest tokens only, and no attention sink."""
    layers = [DynamicSlidingWindowLayer(sliding_window=capacity) for _ in range(model.config.num_hidden_layers)]
    return Cache(layers=layers), nullcontext()


RUNS = {f"msrnn {policy}": bounded(policy) for policy in POLICIES}
RUNS["transformers full"] = lambda model, length, capacity: (DynamicCache(config=model.config), nullcontext())
RUNS["transformers static"] = lambda model, length, capacity: (
    StaticCache(config=model.config, max_cache_len=length + ROOM),
    nullcontext(),
)
RUNS["transformers sliding"] = sliding
RUNS["transformers quantised, 4 bits"] = quantised(4)
RUNS["transformers quantised, 2 bits"] = quantised(2)

if __name__ == "__main__":
    serve(RUNS, {"msrnn": msrnn.__version__} | {name: version(name) for name in ("transformers", "torch")})
