"""What a student is asked: prompts without a reward of their own, from one dataset or from several that each have their
teacher.

A group of rollouts carries the index of its dataset in its builder, and a datum beside itself (`on_policy`), from the
batch to the teacher. So a group that fails, or is filtered, takes its index along, and no other group gets it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from stovetop.datasets import Row, Split, load_rows, split_rows, text_of
from stovetop.distillation.teachers import TeacherConfig
from stovetop.errors import InvalidRequest
from stovetop.named_data import LeftOut
from stovetop.preference.envs import PreferenceEnv
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, ensure_text, message_from_json
from stovetop.rl.problem_env import ProblemDataset, ProblemGroupBuilder
from stovetop.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, RLDatasetBuilder, Trajectory
from stovetop.tokenizing import Tokenizer

log = logging.getLogger(__name__)

PromptOnlyEnv = PreferenceEnv  # one answer to a prompt, and no reward: in both cases that comes from elsewhere


# ---- prompts -----------------------------------------------------------------------------------------------------


def prompt_from_row(row: Row) -> list[Message] | None:
    """A chat from `messages` up to the last user message, or one question from `question` or `prompt`. None without
    any of these."""
    question = text_of(row, "question", "prompt")
    if question is not None:
        return [Message(role="user", content=question)]
    messages = row.get("messages")
    if not isinstance(messages, list):
        return None
    chat = [message_from_json(message, f"message {index}") for index, message in enumerate(messages)]
    while chat and chat[-1]["role"] != "user":
        chat.pop()
    return chat or None


def prompt_of_row(row: Row, place: str) -> list[Message] | LeftOut:
    """The same for `named_data.load_data`: rows without a prompt are left out, and errors name the place."""
    try:
        return prompt_from_row(row) or LeftOut("it has no prompt")
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error}") from error


def truncated_prompt(prompt: Sequence[Message], tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Message]:
    """The prompt with the text of its last message cut to so many tokens, from the end. A character that the cut went
    through is left out."""
    *before, last = prompt
    tokens = tokenizer.encode(ensure_text(last["content"]), add_special_tokens=False)
    if len(tokens) <= max_prompt_tokens:
        return list(prompt)
    shortened = last.copy()
    shortened["content"] = tokenizer.decode(tokens[:max_prompt_tokens]).rstrip("\ufffd")
    return [*before, shortened]


class PromptOnlyDataset:
    """An RLDataset of prompts: shuffled in every epoch, `groups_per_batch` at a time, `group_size` answers to each.
    Long ones are cut (`truncated_prompt`), and `num_truncated` says how many were. The last batch of an epoch may have
    fewer prompts; with `drop_last` each epoch leaves those out."""

    def __init__(
        self,
        prompts: Sequence[Sequence[Message]],
        groups_per_batch: int,
        renderer: Renderer,
        *,
        group_size: int = 4,
        max_prompt_tokens: int | None = None,
        dataset_name: str = "prompts",
        seed: int = 0,
        num_epochs: int = 1,
        drop_last: bool = False,
    ) -> None:
        kept = [
            list(prompt)
            if max_prompt_tokens is None
            else truncated_prompt(prompt, renderer.tokenizer, max_prompt_tokens)
            for prompt in prompts
        ]
        self.num_truncated = sum(short != list(prompt) for short, prompt in zip(kept, prompts, strict=True))
        if self.num_truncated:
            log.warning(
                "%d of %d prompts have more than max_prompt_tokens=%s tokens, and lost their end",
                self.num_truncated,
                len(prompts),
                max_prompt_tokens,
            )
        builders = [
            ProblemGroupBuilder(partial(PromptOnlyEnv, prompt, renderer), group_size, dataset_name) for prompt in kept
        ]
        self._batches = ProblemDataset(
            builders, groups_per_batch, seed=seed, num_epochs=num_epochs, drop_last=drop_last
        )

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`, counted over all epochs: one for each prompt."""
        return self._batches.get_batch(index)

    def __len__(self) -> int:
        return len(self._batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOnlyDatasetBuilder:
    """An RLDatasetBuilder: prompts of a source that `datasets.load_rows` knows, or those that are there already."""

    source: str | Split[list[Message]]
    renderer: Renderer
    groups_per_batch: int  # prompts; where there are fewer, they are one batch
    group_size: int = 4  # answers to each; one in the test set
    prompt_of_row: Callable[[Row], Sequence[Message] | None] = prompt_from_row  # None: the row is left out
    split: str | None = None  # of a hub's dataset
    test_size: int = 0  # prompts held out of a source
    max_prompt_tokens: int | None = None  # of the last message
    dataset_name: str = "prompts"  # the tag
    seed: int = 0  # of the order, and of which are held out
    num_epochs: int = 1
    drop_last: bool = False  # each epoch leaves out the prompts that do not fill a batch

    async def __call__(self) -> tuple[PromptOnlyDataset, PromptOnlyDataset | None]:
        train, test = self._load(self.source) if isinstance(self.source, str) else self.source
        make = partial(
            PromptOnlyDataset,
            renderer=self.renderer,
            max_prompt_tokens=self.max_prompt_tokens,
            dataset_name=self.dataset_name,
            seed=self.seed,
        )
        groups_per_batch = self.groups_per_batch if self.drop_last else min(self.groups_per_batch, len(train))
        return (
            make(
                train,
                groups_per_batch,
                group_size=self.group_size,
                num_epochs=self.num_epochs,
                drop_last=self.drop_last,
            ),
            make(test, min(self.groups_per_batch, len(test)), group_size=1) if test else None,
        )

    def _load(self, source: str) -> Split[Sequence[Message]]:
        rows = load_rows(source, split=self.split)
        prompts = [prompt for prompt in map(self.prompt_of_row, rows) if prompt is not None]
        if len(prompts) < len(rows):
            log.warning("%d of %d rows of %s have no prompt", len(rows) - len(prompts), len(rows), source)
        if not prompts:
            raise InvalidRequest(f"none of the {len(rows)} rows has a prompt: {source!r}")
        return split_rows(prompts, self.test_size, self.seed)


# ---- several datasets --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourcedGroupBuilder(EnvGroupBuilder):
    """A group builder, and which dataset it is of."""

    builder: EnvGroupBuilder
    dataset_index: int

    async def make_envs(self) -> Sequence[Env]:
        return await self.builder.make_envs()

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        return await self.builder.compute_group_rewards(trajectories_G, envs_G)

    def logging_tags(self) -> Sequence[str]:
        return self.builder.logging_tags()


class CompositeDataset:
    """An RLDataset of several: each batch has `groups_per_batch[i]` groups of dataset i, in order, or what is left of
    its epoch. It is as long as the shortest of them."""

    def __init__(self, datasets: Sequence[RLDataset], groups_per_batch: Sequence[int]) -> None:
        if not datasets or len(datasets) != len(groups_per_batch):
            raise InvalidRequest(
                "a CompositeDataset needs a number of groups for each of its datasets, and at least one: "
                f"{len(datasets)} datasets, groups_per_batch {list(groups_per_batch)}"
            )
        self._datasets = datasets
        self._groups_per_batch = groups_per_batch

    def __len__(self) -> int:
        return min(map(len, self._datasets))

    def get_batch(self, index: int) -> list[SourcedGroupBuilder]:
        """The groups of batch `index` of all datasets, each marked with its own. A dataset with more of them than it is
        to have is refused."""
        return [
            SourcedGroupBuilder(builder, dataset_index)
            for dataset_index in range(len(self._datasets))
            for builder in self._get_part(dataset_index, index)
        ]

    def _get_part(self, dataset_index: int, index: int) -> Sequence[EnvGroupBuilder]:
        part, most = self._datasets[dataset_index].get_batch(index), self._groups_per_batch[dataset_index]
        if len(part) > most:
            raise InvalidRequest(
                f"dataset {dataset_index} has {len(part)} groups in batch {index}; its groups_per_batch is {most}, "
                "and both must agree"
            )
        return part


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationDatasetConfig:
    """One dataset and its teacher."""

    dataset_builder: RLDatasetBuilder
    teacher_config: TeacherConfig
    groups_per_batch: int  # as the dataset itself has it


async def create_composite_dataset(
    configs: Sequence[DistillationDatasetConfig],
) -> tuple[CompositeDataset, list[RLDataset]]:
    """The training sets as one, and the test sets that there are."""
    made = [await config.dataset_builder() for config in configs]
    composite = CompositeDataset([train for train, _ in made], [config.groups_per_batch for config in configs])
    return composite, [test for _, test in made if test is not None]
