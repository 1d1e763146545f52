"""REWARD_MODEL as a whole, which trains a preference model, and PAIRWISE_REINFORCEMENT, which one judges; on the
recording backend, and where attention is needed on a transformer."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kitchen.stages.configs import PairwiseConfig, RewardModelConfig, write_comparisons
from kitchen.test_supervised import checkpoints, rows, weights
from stovetop.backends import recording
from stovetop.backends.opened_base import Call
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.checkpoints import get_last_checkpoint
from stovetop.client import ServiceClient
from stovetop.errors import StageFailed
from stovetop.kitchen import stage
from stovetop.kitchen.run_config import RunConfig
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import PAIRWISE_REINFORCEMENT, REWARD_MODEL
from stovetop.preference.comparison_renderer import ComparisonRenderer
from stovetop.preference.reward_model import PreferenceModel
from stovetop.preference.types import Comparison, Label, LabeledComparison
from stovetop.renderers.base import SupervisedExample
from stovetop.renderers.messages import get_text_content
from stovetop.runs import Run, open_run
from stovetop.types import ModelInput
from tiny_service import open_tiny

NUM_STEPS = 6  # of two epochs: six comparisons to train on, two a step


@pytest.fixture
def config(tmp_path: Path) -> RewardModelConfig:
    return RewardModelConfig(dataset=write_letters(tmp_path / "rows.jsonl"), log_path=str(tmp_path / "run"))


def write_letters(file: Path, num: int = 9) -> str:
    """The better answers end with a small letter, the worse with a capital."""
    answers = [f"{i} {'abc'[i % 3]}" for i in range(num)]
    rows = [{"prompt": f"q{text}", "chosen": text, "rejected": text.upper()} for text in answers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


async def train(config: RunConfig, workflow: Workflow = REWARD_MODEL) -> Sequence[Call]:
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False) as run,
    ):
        await workflow.run(config, service=service, run=run)
        return service.calls


# ---- the model that judges -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LastLetter:
    """A comparison in two tokens, for a model that sees no more at once: the last letter of A, and the label."""

    tokenizer: ByteTokenizer

    @property
    def label_of_token(self) -> Mapping[int, Label]:
        return {ord("A"): "A", ord("B"): "B", ord("T"): "Tie"}

    def build_generation_prompt(self, comparison: Comparison) -> ModelInput:
        return ModelInput.from_ints([ord(get_text_content(comparison.completion_A[-1])[-1])])

    def to_model_input_weights(self, labeled: LabeledComparison) -> SupervisedExample:
        [letter] = self.build_generation_prompt(labeled.comparison).to_ints()
        return SupervisedExample(ModelInput.from_ints([letter, ord(labeled.label[0])]), np.array([0.0, 1.0]))


@stage(writes="comparison_renderer")
def show_last_letter() -> ComparisonRenderer:
    return LastLetter(ByteTokenizer())


def test_it_learns_to_judge_comparisons_that_it_has_not_seen(config: RewardModelConfig) -> None:
    config = replace(config, num_epochs=4)
    asyncio.run(train(config, REWARD_MODEL.replace("init_comparison_renderer", show_last_letter)))
    first, *_, last = rows(config.log_path)
    assert (first["test/accuracy"], first["test/no_answer"]) == (0.0, 1.0)
    assert (last["test/accuracy"], last["test/no_answer"]) == (1.0, 0.0)
    assert last["test/nll"] < first["test/nll"]


def test_a_judge_that_sees_one_token_is_right_in_half_of_both_orders(config: RewardModelConfig) -> None:
    """Put as a chat: the last token before the answer is always the same."""
    asyncio.run(train(replace(config, num_epochs=4)))
    first, *_, last = rows(config.log_path)
    assert (first["test/accuracy"], first["test/no_answer"]) == (0.0, 1.0)
    assert (last["test/accuracy"], last["test/no_answer"]) == (0.5, 0.0)


def test_every_step_trains_each_comparison_in_both_orders_on_one_token(config: RewardModelConfig) -> None:
    asyncio.run(train(config))
    found = rows(config.log_path)
    assert [row["step"] for row in found] == list(range(NUM_STEPS + 1))
    assert {(row["num_sequences"], row["num_loss_tokens"], row["num_untrainable"]) for row in found[:-1]} == {(4, 4, 0)}


def stopping_at(at: int):
    @stage
    def stops(step: int) -> None:
        if step == at:
            raise ValueError("stopped")

    return stops


def test_a_run_that_is_stopped_and_resumed_is_the_run_that_would_have_been(config: RewardModelConfig) -> None:
    whole = replace(config, log_path=f"{config.log_path}-whole")
    asyncio.run(train(whole))
    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(config, REWARD_MODEL.insert_after("log_step", stopping_at(4))))
    asyncio.run(train(config))
    assert rows(config.log_path) == rows(whole.log_path)
    assert weights(config.log_path) == weights(whole.log_path)
    assert checkpoints(config.log_path) == checkpoints(whole.log_path) == [("000003", 3), ("final", 6)]


# ---- the policy that is judged ---------------------------------------------------------------------------------------


@pytest.fixture
def judged(tmp_path: Path) -> PairwiseConfig:
    dataset = write_comparisons(tmp_path / "comparisons.jsonl")
    return PairwiseConfig(dataset=dataset, log_path=str(tmp_path / "policy"), temperature=1.0, group_size=4)


class MoreLetters:
    """Prefers the answer of which the larger part are small letters."""

    async def __call__(self, comparison: Comparison) -> float:
        shares = [self._share(one[-1]) for one in (comparison.completion_A, comparison.completion_B)]
        return float((shares[1] > shares[0]) - (shares[1] < shares[0]))

    def _share(self, message: object) -> float:
        text = get_text_content(message)  # pyright: ignore[reportArgumentType]  a Message
        return sum(letter.islower() for letter in text) / max(1, len(text))


@stage(writes="preference_model")
def init_more_letters() -> PreferenceModel:
    return MoreLetters()


@pytest.mark.slow
def test_a_policy_comes_to_be_preferred_to_the_answers_that_are_held_out(judged: PairwiseConfig) -> None:
    config = replace(judged, num_epochs=8, group_size=8, eval_every=99, save_every=0)
    asyncio.run(train(config, PAIRWISE_REINFORCEMENT.replace("init_preference_model", init_more_letters)))
    first, *_, last = rows(config.log_path)
    assert first["test/win_rate"] < 0.5 < last["test/win_rate"]


def test_the_judge_has_the_weights_that_a_reward_model_has_trained(
    config: RewardModelConfig, judged: PairwiseConfig
) -> None:
    asyncio.run(train(replace(config, model_name="any/model")))
    record = get_last_checkpoint(config.log_path, "sampler_path")
    assert record is not None
    calls = asyncio.run(train(replace(judged, rm_weights_path=record.sampler_path), PAIRWISE_REINFORCEMENT))
    opened = [call.arguments for call in calls if call.verb == "create_sampling_client"]
    assert opened == [{"model_path": record.sampler_path, "base_model": None}]
    assert all(row["env/all/format"] <= 1 for row in rows(judged.log_path)[:-1])
    assert all("test/win_rate" in row for row in (rows(judged.log_path)[0], rows(judged.log_path)[-1]))


# ---- both ------------------------------------------------------------------------------------------------------------


def test_they_have_no_problems_and_every_field_of_their_configs_is_read(
    config: RewardModelConfig, judged: PairwiseConfig
) -> None:
    for workflow, value in ((REWARD_MODEL, config), (PAIRWISE_REINFORCEMENT, judged)):
        checked = workflow.check(value, {"service": ServiceClient, "run": Run})
        assert (checked.problems, checked.unread) == ((), ())


@pytest.mark.slow
def test_a_transformer_learns_to_judge_with_attention(tmp_path: Path) -> None:
    """Ten seconds: the letter that counts is far from the label."""
    config = RewardModelConfig(
        dataset=write_letters(tmp_path / "rows.jsonl", 40), test_size=8, log_path=str(tmp_path / "run"),
        learning_rate=0.006, num_epochs=8, batch_size=4, lora_rank=8, eval_every=0, save_every=0,
    )  # fmt: skip
    with open_tiny(tmp_path / "tiny") as tiny, open_run(config.log_path, config, console=False) as run:
        config = replace(config, model_name=tiny.model)
        asyncio.run(REWARD_MODEL.run(config, service=tiny.service, run=run))
    assert rows(config.log_path)[-1]["test/accuracy"] > 0.9
