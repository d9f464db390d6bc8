"""lm-eval: the public harness drives a bounded model under the name `msrnn`.

python -m msrnn.eval.lm_eval run --model msrnn --model_args policy=tova:512 --tasks lambada_openai

or `lm_eval.simple_evaluate(model=BoundedLM(policy="tova:512"), ...)`. Nothing is ever truncated: a bounded state takes
a text of any length. Needs the extra `lm-eval`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from transformers import PreTrainedModel

from ..hf.cache import cache
from ..hf.load import load
from ..plan import PolicyLike
from ..system.console import progress
from .generation import generate, pad_left
from .perplexity import token_nll

Request = tuple[Any, list[int], list[int]]


@register_model("msrnn")
class BoundedLM(TemplateLM):  # type: ignore[misc]
    """`pretrained` is a name as for `msrnn.load` or a loaded model, given together with its tokenizer."""

    def __init__(
        self,
        pretrained: str | PreTrainedModel | None = None,
        policy: PolicyLike = "tova:512",
        *,
        tokenizer: Any = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        max_gen_toks: int = 256,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, PreTrainedModel):
            if tokenizer is None:
                raise ValueError("a loaded model was given without its tokenizer; give tokenizer=")
            self.model, self.tokenizer = pretrained, tokenizer
        else:
            self.model, self.tokenizer = load(pretrained, dtype=dtype, device=device)
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size!r}; msrnn takes a whole number of at least 1")
        self.policy, self.batch_size, self.max_gen_toks = policy, int(batch_size), max_gen_toks
        cache(self.model, policy)  # a policy that the model cannot take is refused now

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.get_input_embeddings().weight.device)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """BOS, or else EOS: the context of a text that has none."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, continue_final_message=not add_generation_prompt, **options
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        has_bos = bool(self.tokenizer.bos_token) and string.startswith(self.tokenizer.bos_token)
        special = not has_bos if add_special_tokens is None else add_special_tokens
        ids: list[int] = self.tokenizer(string, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _loglikelihood_tokens(self, requests: list[Request], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The logarithm of each continuation's probability after its context, and whether greedy decoding gives it."""
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        for batch in _batches(order, self.batch_size, "likelihood", disable_tqdm):
            pairs = [requests[index][1:] for index in batch]
            for index, answer in zip(batch, self._likelihoods(pairs), strict=True):
                answers[index] = answer
        return answers

    @torch.no_grad()
    def _likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        """One forward pass for a batch, padded on the left; logits for the longest continuation only."""
        ids, mask = (part.to(self.device) for part in pad_left([(a + b)[:-1] for a, b in pairs], self.eot_token_id))
        longest = max(1, *(len(continuation) for _, continuation in pairs))
        logits = self.model(
            ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache(self.model, self.policy),
            use_cache=True,
            logits_to_keep=longest,
        ).logits
        for row, (_, continuation) in zip(logits, pairs, strict=True):
            log_probs = row[row.shape[0] - len(continuation) :].float().log_softmax(-1)
            targets = torch.tensor(continuation, device=log_probs.device)
            total = float(log_probs.gather(1, targets[:, None]).double().sum())
            yield total, bool((log_probs.argmax(-1) == targets).all())

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, each read from an empty state without windows."""
        totals = []
        for batch in _batches(requests, 1, "texts", disable_tqdm):
            ids = self.tok_encode(batch[0].args[0], add_special_tokens=False)
            whole = torch.tensor([[self.prefix_token_id, *ids]])
            totals.append(-float(token_nll(self.model, whole, self.policy).double().sum()) if ids else 0.0)
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of the given stops; greedy unless the task asks to sample."""
        answers: list[str] = []
        for batch in _batches(requests, 1, "answers", disable_tqdm):
            context, settings = batch[0].args
            temperature = float(settings.get("temperature", 0.0) or 0.0) if settings.get("do_sample") else 0.0
            tokens = int(settings.get("max_gen_toks", self.max_gen_toks))
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            seeds = [len(answers)] if temperature else []
            options: dict[str, Any] = {"temperature": temperature, "seeds": seeds}
            outputs = generate(self.model, self.tokenizer, [prompt], self.policy, tokens, **options)
            answers.append(_until(outputs[0].text, settings.get("until") or []))
        return answers


def _until(text: str, stops: str | Sequence[str]) -> str:
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.split(stop)[0] if stop else text
    return text


def _batches(items: Sequence[Any], size: int, name: str, quiet: bool) -> Iterator[Sequence[Any]]:
    with progress(len(items), name, "request", quiet) as bar:
        for start in range(0, len(items), size):
            yield items[start : start + size]
            bar.update(min(size, len(items) - start))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
