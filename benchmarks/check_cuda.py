"""Does the core hold on a GPU? The recurrence against the definition, whole models against the CPU, the wavefront.

Needs only torch and transformers there (numba may be missing): `PYTHONPATH=src python benchmarks/check_cuda.py`.
"""

from __future__ import annotations

import sys

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import msrnn
from msrnn.bench import measure, prefill, shapes
from msrnn.core import recurrence, reference
from msrnn.core.attention import Attention
from msrnn.core.slots import State
from msrnn.engine.pipeline import CHUNK, Wavefront
from msrnn.hf.cache import BoundedCache, BoundedLayer
from msrnn.policy import parse
from msrnn.rnn import RNN

POLICIES = ("tova:16", "window+4:16", "h2o:16", "tova-head:16", "tova:16,momentum=0.5", "full")


def against_reference(text: str) -> float:
    """The largest difference of outputs; survivors must be the same."""
    torch.manual_seed(0)
    policy, attention = parse(text), Attention(0.5)
    query, key, value = (torch.randn(1, n, 60, 8, dtype=torch.float64) for n in (4, 2, 2))
    ref = reference.start(policy, 4, 2)
    want = reference.run(ref, query[0], key[0], value[0], policy, attention)
    state = State.empty(policy, key.cuda(), value.cuda(), 4)
    parts = [slice(0, 25), slice(25, 26), slice(26, 60)]
    moved = [[tensor[:, :, part].cuda() for tensor in (query, key, value)] for part in parts]
    out = torch.cat([recurrence.run(state, *part, policy, attention, chunk=16) for part in moved], 2)
    for unit, rows in enumerate(ref.rows):
        kept = sorted(p for p in state.positions[0, unit].tolist() if p >= 0)
        assert kept == sorted(row.position for row in rows), f"{text}: other survivors on CUDA"
    return float((out[0].cpu() - want).abs().max())


def whole_model(text: str) -> bool:
    """Greedy tokens of a ragged batch in float32 on CUDA equal those on the CPU."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 97}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    model = LlamaForCausalLM(config).eval()
    ids, mask = torch.randint(0, 97, (3, 40)), torch.ones(3, 40, dtype=torch.long)
    mask[0, :20] = mask[2, :7] = 0
    texts = []
    for device in ("cpu", "cuda"):
        model.to(device)
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "pad_token_id": 0}
        made = msrnn.cache(model, text)
        texts.append(model.generate(**inputs, past_key_values=made, max_new_tokens=24, do_sample=False).cpu())
    return torch.equal(*texts)


class Apart(Wavefront):
    """The same chunks on the same lanes without a graph: none begins before the last is done."""

    apart = True

    def _round(self, size: int, tokens: Tensor, at: int) -> Tensor:
        self.tokens[:, : tokens.shape[1]] = tokens
        self.start.fill_(at)
        logits = self._chunks(size, apart=self.apart and bool(self.streams))
        self._forget_events()
        return logits


class Beside(Apart):
    """As they are in a graph, side by side, but launched one by one."""

    apart = False


def against_chunks(device: str, layers: int, lengths: tuple[int, ...], joined: bool) -> bool:
    """Prompts read by several lanes at once, beside the plain chunks of `RNN`, at the width of LLaMA-2-7B.

    In float64, where no survivor hangs on how sums are rounded. Every length has a wavefront of its own, read twice:
    captured and replayed.
    """
    model, policy, chunk = _wide(device, layers, torch.float64)
    rnn, good = RNN(model, policy, chunk=chunk, piece=chunk), True
    for length in lengths:
        ids, state = prefill.prompt(model, 1, length), rnn.start()
        for part in torch.split(ids, chunk, 1):
            want, state = rnn.step(part, state)
        front = Wavefront(rnn, chunk=chunk, joined=joined)
        for how in ("captured", "replayed"):
            got, read = front.read(ids)
            same = sum(_survivors(a) == _survivors(b) for a, b in zip(read.bounded, state.cache.bounded, strict=True))
            off = float((got - want).abs().max())
            good = good and same == layers and off < 1e-5  # norms are in float32
            told = f"{same} of {layers} layers keep the same tokens, logits off by {off:.1e}"
            print(f"float64, {length} tokens, joined {joined}, {how}: {told}", flush=True)
        del front
        measure.clear(rnn.device)
    return good


def against_itself(device: str, layers: int, lengths: tuple[int, ...], joined: bool) -> bool:
    """In the model's own bfloat16: lanes side by side, launched or replayed, leave the very bits that one by one do."""
    model, policy, chunk = _wide(device, layers, torch.bfloat16 if device == "cuda" else torch.float32)
    rnn, good = RNN(model, policy, chunk=chunk, piece=chunk), True
    for length in lengths:
        ids = prefill.prompt(model, 1, length)
        fronts = {kind.__name__: kind(rnn, chunk=chunk, joined=joined) for kind in (Apart, Beside, Wavefront)}
        want = _bits(*fronts["Apart"].read(ids))
        for name in ("Beside", "Beside", "Wavefront", "Wavefront", "Wavefront"):
            same = [torch.equal(a, b) for a, b in zip(_bits(*fronts[name].read(ids)), want, strict=True)]
            good = good and all(same)
            print(f"bits, {length} tokens, joined {joined}, {name}: {sum(same)} of {len(same)} the same", flush=True)
        del fronts
        measure.clear(rnn.device)
    return good


def _wide(device: str, layers: int, dtype: torch.dtype) -> tuple[PreTrainedModel, str, int]:
    """A model at full width, a policy, and the tokens of a chunk; all small without a GPU."""
    shape, policy, chunk = ("llama-2-7b", "tova:512", CHUNK) if device == "cuda" else ("tiny", "tova:16", 16)
    return shapes.make(shape, dtype, device, num_hidden_layers=layers), policy, chunk


def _survivors(layer: BoundedLayer) -> list[int]:
    assert layer.state is not None
    return sorted(layer.state.positions.flatten().tolist())


def _bits(logits: Tensor, read: BoundedCache) -> list[Tensor]:
    """All that a reading leaves."""
    states = [layer.state for layer in read.bounded if layer.state is not None]
    return [logits, *(tensor for state in states for tensor in state.tensors().values())]


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{measure.machine(torch.device(device))}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    if device == "cuda":
        for text in POLICIES:
            print(f"{text:24} reference {against_reference(text):.1e}   greedy as on the CPU: {whole_model(text)}")
    layers, bits, chunks = (12, (4096, 30000, 4096, 9999), (4096, 9999)) if device == "cuda" else (2, (999,), (700,))
    good = True
    for joined in (False, True):
        good &= against_itself(device, layers, bits, joined)
        good &= against_chunks(device, layers, chunks, joined)
    sys.exit(0 if good else "a wavefront differs: see above")


if __name__ == "__main__":
    main()
