"""Whether long prompts are read in pieces, on several streams, by vLLM's configuration."""

from __future__ import annotations

from typing import Any

from ..policy import Policy
from . import settings
from .lanes import LANES
from .read_graphs import most_slots

WORKER = "msrnn.vllm.worker.Worker"
_WHOLE_MODEL = 1  # vLLM's compilation mode STOCK_TORCH_COMPILE, which would compile the pieces with the model


def lane_count(config: Any) -> int:
    """So many streams, 0 for none: not where passes of the model side by side would share memory or wait for others.

    Mixtures of experts and quantised weights have buffers that a pass uses alone, LoRA adapters know tokens by their
    place in the batch, and processes that split a model meet in every layer. Layers of several kinds have graphs of
    their own, too many to have them once for every lane. Reads without graphs, of very large states, would take memory
    for every lane that vLLM's profile has not counted.
    """
    parallel, model, policies = config.parallel_config, config.model_config, settings.policies()
    alone = (
        parallel.worker_cls == WORKER
        and parallel.tensor_parallel_size == 1
        and parallel.data_parallel_size == 1
        and model.quantization is None
        and config.lora_config is None
        and not model.is_moe
        and config.compilation_config.mode != _WHOLE_MODEL
        and len(policies) == 1
        and isinstance(policies[0], Policy)
        and (policies[0].capacity or 0) + 1 <= most_slots(policies[0])
    )
    return LANES if alone else 0


def least_in_pieces(config: Any) -> int | None:
    """A batch with one prompt and so many tokens in all can be read in pieces that end anywhere; None: none can.

    Smaller ones may be CUDA graphs of vLLM's, and M-RoPE has several positions for a token (HunYuan-VL's is called
    XD-RoPE in older versions of vLLM).
    """
    model = config.model_config
    if lane_count(config) == 0 or model.uses_mrope or getattr(model, "uses_xdrope_dim", 0):
        return None
    return (config.compilation_config.max_cudagraph_capture_size or 0) + 1
