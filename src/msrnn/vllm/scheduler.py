"""vLLM's scheduler, with blocks that are free at once and pieces of prompts that end where states are kept.

A state is kept between two batches, and vLLM ends a piece where its token budget does. It has a place for pieces that
must end elsewhere, for recurrent models; a bounded state is one. Only a prompt that is read alone may go on: the worker
reads it in pieces within a batch, and keeps states between those.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .lane_count import least_in_pieces
from .pool import EVERY, INTERVAL, piece


class _Pieces:
    """Mixed into vLLM's schedulers."""

    def __init__(self, vllm_config: Any, **options: Any) -> None:
        super().__init__(vllm_config, **options)  # type: ignore[call-arg]
        transfer = vllm_config.kv_transfer_config
        self.every = INTERVAL if transfer is None else transfer.kv_connector_extra_config.get(EVERY, INTERVAL)
        self.need_mamba_block_aligned_split = getattr(self.connector, "states", 0) > 0  # type: ignore[attr-defined]
        self.least_in_pieces = None if transfer is None else least_in_pieces(vllm_config)
        # Blocks are copied and filled on the model's stream, after the writes of batches before: they are free at once.
        self.defer_block_free = False

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, local_tokens: int = 0, external_tokens: int = 0
    ) -> int:
        if self.least_in_pieces is not None and num_new_tokens >= self.least_in_pieces and self._is_alone(request):
            return num_new_tokens
        start = request.num_computed_tokens + local_tokens + external_tokens
        return piece(start, num_new_tokens, request.num_prompt_tokens, self.every)

    def _is_alone(self, request: Any) -> bool:
        """Whether no other request waits or still has prompt to read."""
        others = [one for one in self.running if one is not request]  # type: ignore[attr-defined]
        waiting = self.get_request_counts()[1] - (len(others) == len(self.running))  # type: ignore[attr-defined]
        return waiting == 0 and all(one.num_computed_tokens >= one.num_prompt_tokens for one in others)


class PieceScheduler(_Pieces, Scheduler):  # type: ignore[misc]
    pass


class AsyncPieceScheduler(_Pieces, AsyncScheduler):  # type: ignore[misc]
    pass


def scheduler(vllm_config: Any, **options: Any) -> Any:
    """What `--scheduler-cls` names: the class that vLLM's settings ask for."""
    kind = AsyncPieceScheduler if vllm_config.scheduler_config.async_scheduling else PieceScheduler
    return kind(vllm_config, **options)
