"""The recurrence as a plain loop over tokens in NumPy: one more implementation of the definition, and a quick one.

It shares no code with msrnn but the policy's and the attention's own numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msrnn.core.attention import Attention
from msrnn.policy import Policy


class Loop:
    """Each unit is a list of positions with their scores; keys and values are looked up by position."""

    def __init__(self, policy: Policy, heads: int, kv_heads: int) -> None:
        self.policy, self.heads, self.kv_heads = policy, heads, kv_heads
        self.units = {"layer": 1, "kv_head": kv_heads, "query_head": heads}[policy.scope]
        self.positions = [np.zeros(0, np.int64) for _ in range(self.units)]
        self.scores = [np.zeros(0) for _ in range(self.units)]

    def run(self, query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
        """query [H, T, D], key [G, T, D], value [G, T, V] -> [H, T, V]"""
        q, k, v = query.numpy(), key.numpy(), value.numpy()
        norms = np.sqrt((v * v).sum(-1))
        out = np.zeros((self.heads, q.shape[1], v.shape[2]))
        for now in range(q.shape[1]):
            for unit in range(self.units):
                self._step(unit, now, q[:, now], k, v, norms, out, attention)
        return torch.from_numpy(out)

    def _step(self, unit, now, q, k, v, norms, out, attention) -> None:  # type: ignore[no-untyped-def]
        members = self.heads // self.units
        positions = np.append(self.positions[unit], now)
        scores = np.append(self.scores[unit], 0.0)
        mean = np.zeros(len(positions))
        for head in range(unit * members, (unit + 1) * members):
            group = head * self.kv_heads // self.heads
            logits = k[group, positions] @ q[head] * attention.scale
            if attention.softcap is not None:
                logits = np.tanh(logits / attention.softcap) * attention.softcap
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            out[head, now] = weights @ v[group, positions]
            mean += weights * (norms[group, positions] if self.policy.gain else 1)
        scores = self.policy.momentum * scores + mean / members
        alive = np.ones(len(positions), bool) if attention.window is None else positions > now + 1 - attention.window
        positions, scores = positions[alive], scores[alive]
        if self.policy.capacity is not None and len(positions) > self.policy.capacity:
            free = (positions >= self.policy.first) & (positions <= now - self.policy.last)
            index = min(np.flatnonzero(free), key=lambda n: (scores[n], positions[n]))
            positions, scores = np.delete(positions, index), np.delete(scores, index)
        self.positions[unit], self.scores[unit] = positions, scores

    def held(self) -> list[list[int]]:
        return [sorted(unit.tolist()) for unit in self.positions]
