import asyncio
import json
import pickle

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.distillation.datasets import (
    CompositeDataset,
    DistillationDatasetConfig,
    PromptOnlyDataset,
    PromptOnlyDatasetBuilder,
    PromptOnlyEnv,
    SourcedGroupBuilder,
    create_composite_dataset,
    prompt_from_row,
    truncated_prompt,
)
from stovetop.distillation.teachers import TeacherConfig
from stovetop.errors import InvalidRequest
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.rollouts import do_group_rollout

RENDERER = ChatTemplateRenderer(ByteTokenizer())


def asks(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def dataset(name: str, num_prompts: int, groups_per_batch: int, **options) -> PromptOnlyDataset:
    prompts = [asks(f"{name}{index}") for index in range(num_prompts)]
    return PromptOnlyDataset(prompts, groups_per_batch, RENDERER, dataset_name=name, **options)


# ---- prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "q"}, asks("q")),
        ({"prompt": "p"}, asks("p")),
        ({"messages": [*asks("q"), {"role": "assistant", "content": "a"}]}, asks("q")),
        ({"messages": [{"role": "assistant", "content": "a"}]}, None),
        ({"question": " "}, None),
        ({"question": None, "prompt": 3}, None),
        ({}, None),
    ],
)
def test_a_row_has_a_prompt_or_none(row, prompt):
    assert prompt_from_row(row) == prompt


def test_a_long_prompt_is_cut_by_tokens_and_keeps_its_turn():
    prompt = [*asks("before"), Message(role="assistant", content="yes"), *asks("12345678")]
    assert truncated_prompt(prompt, ByteTokenizer(), 3) == [*prompt[:2], *asks("123")]
    assert truncated_prompt(prompt, ByteTokenizer(), 8) == prompt
    assert prompt[-1] == asks("12345678")[0]


def test_a_character_is_never_cut_in_two():
    assert truncated_prompt(asks("a€"), ByteTokenizer(), 3) == asks("a")


def test_cut_prompts_are_counted(caplog):
    made = PromptOnlyDataset([asks("12345678"), asks("1"), asks("123")], 2, RENDERER, max_prompt_tokens=3)
    assert made.num_truncated == 1
    assert caplog.messages == ["1 of 3 prompts have more than max_prompt_tokens=3 tokens, and lost their end"]


def test_an_answer_has_no_reward_whatever_it_is():
    async def policy(model_input, stop, *, max_tokens=None) -> TokensWithLogprobs:
        return TokensWithLogprobs([97], [-1.0], "length")

    [builder] = dataset("a", 1, 1, group_size=3).get_batch(0)
    group = asyncio.run(do_group_rollout(builder, policy))
    assert group.get_total_rewards() == [0.0, 0.0, 0.0]
    assert builder.logging_tags() == ["a"]


def test_environments_pickle():
    env = pickle.loads(pickle.dumps(PromptOnlyEnv(asks("q"), RENDERER)))
    assert asyncio.run(env.initial_observation())[0] == RENDERER.build_generation_prompt(asks("q"))


def test_a_builder_makes_a_training_set_and_a_test_set_of_single_answers(tmp_path, caplog):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{index}"}) + "\n" for index in range(5)) + '{"other": 1}\n')
    config = PromptOnlyDatasetBuilder(
        source=str(path), renderer=RENDERER, groups_per_batch=3, group_size=2, test_size=2, num_epochs=2
    )
    train, test = asyncio.run(config())
    assert (len(train), len(test)) == (2, 1)
    assert [len(asyncio.run(builder.make_envs())) for builder in train.get_batch(0)] == [2, 2, 2]
    assert [len(asyncio.run(builder.make_envs())) for builder in test.get_batch(0)] == [1, 1]
    assert caplog.messages == [f"1 of 6 rows of {path} have no prompt"]


def test_bundled_rows_are_prompts_of_four_answers_unless_told_otherwise(caplog):
    config = PromptOnlyDatasetBuilder(source="sample:arithmetic", renderer=RENDERER, groups_per_batch=4)
    train, test = asyncio.run(config())
    assert (len(train), test) == (16, None)
    assert [len(asyncio.run(builder.make_envs())) for builder in train.get_batch(0)] == [4] * 4
    assert caplog.messages == []


def test_a_source_without_a_prompt_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"other": 1}\n')
    with pytest.raises(InvalidRequest, match="none of the 1 rows has a prompt"):
        asyncio.run(PromptOnlyDatasetBuilder(source=str(path), renderer=RENDERER, groups_per_batch=1)())


def test_each_prompt_is_answered_four_times_unless_told_otherwise():
    for options, num_answers in (({}, 4), ({"group_size": 2}, 2)):
        [builder] = dataset("d", 1, 1, **options).get_batch(0)
        assert len(asyncio.run(builder.make_envs())) == num_answers


# ---- several datasets ----------------------------------------------------------------------------------------


def test_a_batch_of_two_datasets_says_of_each_group_whose_it_is():
    composite = CompositeDataset([dataset("a", 4, 2), dataset("b", 9, 3)], [2, 3])
    batch = composite.get_batch(0)
    assert [builder.dataset_index for builder in batch] == [0, 0, 1, 1, 1]
    assert [builder.logging_tags() for builder in batch] == [["a"]] * 2 + [["b"]] * 3
    assert len(composite) == 2  # that of the shorter


def test_a_dataset_with_another_number_of_groups_is_refused():
    with pytest.raises(InvalidRequest, match="dataset 1 has 3 groups in batch 0; its groups_per_batch is 2"):
        CompositeDataset([dataset("a", 4, 2), dataset("b", 9, 3)], [2, 2]).get_batch(0)
    with pytest.raises(InvalidRequest, match="1 datasets, groups_per_batch"):
        CompositeDataset([dataset("a", 4, 2)], [2, 3])


def test_a_sourced_builder_is_the_one_that_it_holds():
    [builder] = dataset("a", 1, 1, group_size=2).get_batch(0)
    sourced = SourcedGroupBuilder(builder, 7)
    assert len(asyncio.run(sourced.make_envs())) == 2
    assert asyncio.run(sourced.compute_group_rewards([], [])) == []
    assert pickle.loads(pickle.dumps(sourced)).dataset_index == 7


def test_configs_become_one_training_set_and_their_test_sets(tmp_path):
    def config(test_size: int) -> DistillationDatasetConfig:
        return DistillationDatasetConfig(
            dataset_builder=PromptOnlyDatasetBuilder(
                source="sample:arithmetic", renderer=RENDERER, groups_per_batch=2, test_size=test_size
            ),
            teacher_config=TeacherConfig(base_model="any/teacher"),
            groups_per_batch=2,
        )

    composite, tests = asyncio.run(create_composite_dataset([config(4), config(0)]))
    assert [builder.dataset_index for builder in composite.get_batch(0)] == [0, 0, 1, 1]
    assert len(tests) == 1
