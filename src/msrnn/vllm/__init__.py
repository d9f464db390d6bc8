"""vLLM: bounded states in a serving engine, as a plugin. `MSRNN_POLICY=tova:512 vllm serve MODEL` is all it takes.

vLLM schedules, batches, samples and serves HTTP. Ours is the attention backend, and with it the memory of a request:
one block of fixed size per layer for its whole life, which holds the layer's slots. `msrnn serve` also names a
scheduler and a worker of ours, by vLLM's own options. No module of vLLM is changed; some of its inner parts are used
beside the public ones: the model's `forward` is wrapped (`worker.py`), the scheduler's `_mamba_block_aligned_split`
overridden and its `need_mamba_block_aligned_split` and `defer_block_free` set (`scheduler.py`), the cache of chosen
backends cleared, and the check of the layers' KV cache specs extended (`plugin.py`). Every process of vLLM imports this
file, so it stays light: without `MSRNN_POLICY` in the environment it does nothing. An empty one is refused: it was
meant to be a bound.
"""

from __future__ import annotations

import os

POLICY = "MSRNN_POLICY"


def register() -> None:
    """vLLM's entry point, called in the front end, the engine and every worker, perhaps more than once."""
    policy = os.environ.get(POLICY)
    if policy is None:
        return
    if not policy.strip():  # `MSRNN_POLICY=$UNSET vllm serve` would run unbounded
        raise ValueError(f"{POLICY} is set but empty; write e.g. {POLICY}=tova:512, or unset it for vLLM without msrnn")
    from .plugin import install

    install()
