"""The other sides of compare.py: transformers with PEFT, padded or sorted by length; `generate`; the trainers of TRL.
Each is used as its documentation shows; all train the same linears with the same rank.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from compare_work import (
    ALPHA,
    GROUP_SIZE,
    LEARNING_RATE,
    RANK,
    Numbers,
    Setting,
    Stopwatch,
    measured,
    num_trained,
    reward,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TrainerCallback,
)

MICRO_BATCH = 4  # sequences, of the sorted side


def load(setting: Setting) -> PreTrainedModel:
    """Warm: its weights, which the system reads when they are first used, are all in memory."""
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=getattr(torch, setting.dtype)).eval()
    with torch.no_grad():
        model(torch.tensor([list(range(8))]))
    return model


def lora() -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")


# ---- supervised ------------------------------------------------------------------------------------------------------


def train_padded(setting: Setting) -> Numbers:
    return _train(setting, lambda sequences: [sequences])


def train_sorted(setting: Setting) -> Numbers:
    def in_fours(sequences: list[list[int]]) -> list[list[list[int]]]:
        ordered = sorted(sequences, key=len)
        return [ordered[start : start + MICRO_BATCH] for start in range(0, len(ordered), MICRO_BATCH)]

    return _train(setting, in_fours)


def _train(setting: Setting, batches_of: Callable[[list[list[int]]], list[list[list[int]]]]) -> Numbers:
    model = get_peft_model(load(setting), lora()).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE)
    sequences = setting.train_data(model.config.vocab_size)

    def step() -> None:
        for batch in batches_of(sequences):
            model(**padded(batch), num_items_in_batch=1).loss.backward()  # a sum over tokens, as ours
        optimizer.step()
        optimizer.zero_grad()

    return measured(step, num_trained(sequences))._asdict()


def padded(sequences: list[list[int]], *, left: bool = False) -> dict[str, Tensor]:
    longest = max(map(len, sequences))
    shape = (len(sequences), longest)
    tokens, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        place = slice(longest - len(sequence), longest) if left else slice(len(sequence))
        tokens[row, place], mask[row, place] = torch.tensor(sequence), 1
    batch = {"input_ids": tokens, "attention_mask": mask}
    return batch if left else {**batch, "labels": tokens.masked_fill(mask == 0, -100)}


# ---- sampling --------------------------------------------------------------------------------------------------------


def generate_equal(setting: Setting) -> Numbers:
    model = load(setting)
    prompts, length = setting.equal_prompts(model.config.vocab_size), setting.size.equal_tokens
    return _generate(model, prompts, [length] * len(prompts))


def generate_ragged(setting: Setting) -> Numbers:
    """Rows that are finished stay in the batch, as `generate` has it."""
    model, tokenizer = load(setting), AutoTokenizer.from_pretrained(setting.model)
    prompts = [tokenizer.encode(text) for text in setting.prompts(tokenizer.encode, setting.size.groups)]
    lengths = setting.group_lengths() * len(prompts)
    return _generate(model, [prompt for prompt in prompts for _ in range(GROUP_SIZE)], lengths)


def _generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> Numbers:
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, **options)
    batch = padded(prompts, left=True)
    stop = ends_at(batch["input_ids"].shape[1], lengths)

    def run() -> None:
        model.generate(**batch, max_new_tokens=max(lengths), stopping_criteria=stop, **options)

    return measured(run, sum(lengths))._asdict()


class _Ends(StoppingCriteria):
    def __init__(self, prompt_length: int, lengths: list[int]) -> None:
        self._ends = torch.tensor(lengths) + prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return input_ids.shape[1] >= self._ends


def ends_at(prompt_length: int, lengths: list[int]) -> StoppingCriteriaList:
    """Row i is finished after `lengths[i]` tokens."""
    return StoppingCriteriaList([_Ends(prompt_length, lengths)])


# ---- TRL -------------------------------------------------------------------------------------------------------------


class _Clock(TrainerCallback):
    """Measures the one step that a trainer is given."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.numbers: Numbers = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._watch = Stopwatch()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.numbers = self._watch.stop(self._num_tokens)._asdict()


def _options(folder: str, batch_size: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": batch_size,
        "max_steps": 1,
        "learning_rate": LEARNING_RATE,
        "gradient_checkpointing": False,
        "bf16": False,  # no autocast: the weights have the dtype that was asked for
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def sft(setting: Setting) -> Numbers:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    sequences = setting.train_data(AutoTokenizer.from_pretrained(setting.model).vocab_size)
    clock = _Clock(num_trained(sequences))
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            load(setting),
            args=SFTConfig(**_options(folder, len(sequences)), max_length=None),
            train_dataset=Dataset.from_dict({"input_ids": sequences}),
            processing_class=AutoTokenizer.from_pretrained(setting.model),
            peft_config=lora(),
            callbacks=[clock],
        )
        trainer.train()
    return clock.numbers


def grpo(setting: Setting) -> Numbers:
    """One step with the lengths that all sides draw: rows end where ours do, as an end-of-text token would end them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load(setting), AutoTokenizer.from_pretrained(setting.model)
    lengths = setting.group_lengths() * setting.size.grpo_groups
    generate = model.generate
    model.generate = lambda **options: generate(
        **options, stopping_criteria=ends_at(options["input_ids"].shape[1], lengths)
    )
    clock = _Clock(sum(lengths))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=GRPOConfig(
                **_options(folder, len(lengths)),
                num_generations=GROUP_SIZE,
                max_completion_length=max(lengths),
                generation_kwargs={"suppress_tokens": [tokenizer.eos_token_id]},
            ),
            train_dataset=Dataset.from_dict({"prompt": setting.prompts(tokenizer.encode, setting.size.grpo_groups)}),
            processing_class=tokenizer,
            peft_config=lora(),
            callbacks=[clock],
        )
        trainer.train()
    return clock.numbers
