"""llama.cpp on the jobs of benchmarks/peers.py, on a CPU: its context shift, and a context for the whole text.

Run by a python that has llama-cpp-python; knows nothing of msrnn. `--model` is a GGUF file. A full context is shifted
as llama.cpp's server does it: the first 4 tokens stay, the older half of the others leaves, and the rest moves up to
new positions. So of `capacity` slots between half and all are in use.
"""

import json
import time
from importlib.metadata import PackageNotFoundError, version

import llama_cpp as library
import numpy as np
from peers_arguments import arguments

FIRST = 4  # tokens that a shift leaves
PIECE = 128  # tokens of a forward
SILENT = library.llama_log_callback(lambda level, text, data: None)


class Context:
    """One sequence in a context of `size` tokens."""

    def __init__(self, model, size, threads):
        options = library.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = size, PIECE, PIECE
        options.n_threads = options.n_threads_batch = threads
        self.size, self.vocabulary = size, library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self.context = library.llama_init_from_model(model, options)
        self.memory = library.llama_get_memory(self.context)
        self.batch = library.llama_batch_init(PIECE, 0, 1)
        self.used = 0

    def close(self):
        library.llama_batch_free(self.batch)
        library.llama_free(self.context)

    def feed(self, ids, count):
        """Logits [count, V] after the last tokens of these, which are at most PIECE."""
        while self.used + len(ids) > self.size:
            self.shift()
        for place, token in enumerate(ids):
            self.batch.token[place], self.batch.pos[place] = token, self.used + place
            self.batch.n_seq_id[place], self.batch.seq_id[place][0] = 1, 0
            self.batch.logits[place] = place >= len(ids) - count
        self.batch.n_tokens = len(ids)
        if library.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode failed after {self.used} tokens")
        self.used += len(ids)
        logits = library.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, shape=(count, self.vocabulary)).copy()

    def shift(self):
        leave = (self.used - FIRST) // 2
        library.llama_memory_seq_rm(self.memory, 0, FIRST, FIRST + leave)
        library.llama_memory_seq_add(self.memory, 0, FIRST + leave, self.used, -leave)
        self.used -= leave


def loss(context, row, continuation):
    """Nats of the continuation, and the seconds of the prompt."""
    start = time.perf_counter()
    for place in range(0, len(row), PIECE):
        last = context.feed(row[place : place + PIECE], 1)
    seconds, nats = time.perf_counter() - start, 0.0
    for place in range(0, len(continuation), PIECE):
        targets = continuation[place : place + PIECE]
        following = context.feed(targets, len(targets))
        logits = np.concatenate([last, following[:-1]]).astype(np.float64)
        peak = logits.max(1)
        normaliser = peak + np.log(np.exp(logits - peak[:, None]).sum(1))
        nats += float((normaliser - logits[np.arange(len(targets)), targets]).sum())
        last = following[-1:]
    return nats, seconds


def work(model, size, threads, job):
    result = {"nll": [], "prefill_s": 0.0, "peak_bytes": 0}
    for row, continuation in zip(job["rows"], job["continuation"], strict=True):
        context = Context(model, size or len(row) + len(continuation), threads)
        nats, seconds = loss(context, row, continuation)
        context.close()
        result["nll"].append(nats)
        result["prefill_s"] += seconds
    return result


def package_version():
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return library.__version__


def main():
    runs = {"llama.cpp full": lambda capacity: None, "llama.cpp shift": lambda capacity: capacity}
    args = arguments(runs)
    library.llama_backend_init()
    library.llama_log_set(SILENT, None)
    model = library.llama_model_load_from_file(args.model.encode(), library.llama_model_default_params())
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {(line["run"], line["id"]) for line in map(json.loads, lines)}
    versions = {"llama-cpp-python": package_version()}
    with args.out.open("a") as out:
        for job in map(json.loads, args.jobs.read_text().splitlines()):
            for name in args.runs:
                if (name, job["id"]) not in done and time.time() < args.deadline:
                    result = work(model, runs[name](args.capacity), args.threads, job)
                    out.write(json.dumps({"run": name, "id": job["id"], "versions": versions, **result}) + "\n")
                    out.flush()


if __name__ == "__main__":
    main()
