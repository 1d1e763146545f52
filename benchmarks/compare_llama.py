"""llama.cpp as a further side of compare.py, where it can be built: `pip install llama-cpp-python`, and the model as a
GGUF file of the same dtype, which `convert_hf_to_gguf.py --outtype f32` (or bf16) of its sources makes.

It is used as its own `batched` example does: all sequences in one batch, each with its own sampler, at temperature 1.
"""

from functools import partial
from typing import Any

import llama_cpp as llama
from compare_work import DECODED_ROWS, Numbers, Setting, decoding_speed

NUM_BATCH = 2048  # tokens of a pass: all prompts in one


def decode(setting: Setting) -> Numbers:
    """Tokens per second of some rows, the prompts not counted, as ours. There is no adapter."""
    assert setting.gguf is not None, "pass --gguf"
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(setting.gguf).encode(), llama.llama_model_default_params())
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    rng, numbers = setting.rng(), {}
    for count in DECODED_ROWS:
        prompts = rng.integers(0, vocabulary, (count, 32)).tolist()
        context = _context(model, count, setting)
        numbers[f"rows {count}"] = decoding_speed(partial(_draw, context, prompts), count, setting.size.equal_tokens)
        llama.llama_free(context)
    return numbers


def _context(model: Any, num_sequences: int, setting: Setting) -> Any:
    params = llama.llama_context_default_params()
    params.n_ctx = 256 * num_sequences  # of all sequences together
    params.n_batch = params.n_ubatch = NUM_BATCH
    params.n_seq_max = num_sequences
    params.n_threads = params.n_threads_batch = setting.threads
    return llama.llama_init_from_model(model, params)


def _draw(context: Any, prompts: list[list[int]], num_tokens: int) -> None:
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    samplers = [llama.llama_sampler_init_dist(seed) for seed in range(len(prompts))]
    batch = llama.llama_batch_init(NUM_BATCH, 0, 1)
    waiting, place = prompts, 0  # what the next pass computes of each, and where that begins
    for _ in range(num_tokens):
        last = _fill(batch, waiting, place)
        if llama.llama_decode(context, batch) != 0:
            raise RuntimeError("llama.cpp has no room for these sequences")
        place += len(waiting[0])
        waiting = [
            [llama.llama_sampler_sample(sampler, context, index)] for sampler, index in zip(samplers, last, strict=True)
        ]
    llama.llama_batch_free(batch)
    for sampler in samplers:
        llama.llama_sampler_free(sampler)


def _fill(batch: Any, sequences: list[list[int]], place: int) -> list[int]:
    """Where in the batch the last token of each is, whose logits are wanted."""
    last: list[int] = []
    batch.n_tokens = 0
    for number, tokens in enumerate(sequences):
        for offset, token in enumerate(tokens):
            index = batch.n_tokens
            batch.token[index], batch.pos[index] = token, place + offset
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, number
            batch.logits[index] = offset == len(tokens) - 1
            batch.n_tokens += 1
        last.append(batch.n_tokens - 1)
    return last
