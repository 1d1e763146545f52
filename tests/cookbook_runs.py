"""The published cookbook's training loops, as they are: what `test_published_cookbook.py` runs.

    python cookbook_runs.py RUN FOLDER MODEL BASE_URL MAX_STEPS

They run on this package; with the address of a server as BASE_URL, on the official SDK. FOLDER holds the data and gets
the run's directory. Nothing of the cookbook is replaced but, for its two loop recipes,
the hub's data set that they name and the table of the hub's models that names their renderer.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not sys.argv[4].startswith("http"):
    import stovetop.as_tinker  # noqa: F401  before everything that imports tinker

# isort: split
import datasets
from tinker_cookbook import model_info
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.recipes import rl_loop, sl_loop
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

RENDERER = "role_colon"
RANK = 4


@dataclass(frozen=True)
class Run:
    folder: Path
    model: str
    base_url: str | None
    max_steps: int

    @property
    def shared(self) -> dict[str, Any]:
        """Fields that the configs of all trainers have."""
        return {
            "log_path": str(self.folder / "log"),
            "model_name": self.model,
            "base_url": self.base_url,
            "max_steps": self.max_steps,
            "lora_rank": RANK,
            "learning_rate": 1e-4,
            "save_every": 1,
        }

    @property
    def trainer(self) -> dict[str, Any]:
        return {**self.shared, "renderer_name": RENDERER, "recipe_name": "published", "eval_every": 3}

    @property
    def chats(self) -> ChatDatasetBuilderCommonConfig:
        return ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=self.model, renderer_name=RENDERER, max_length=256, batch_size=2
        )

    @property
    def sums(self) -> ArithmeticDatasetBuilder:
        return ArithmeticDatasetBuilder(
            batch_size=2,
            model_name_for_tokenizer=self.model,
            renderer_name=RENDERER,
            n_batches=100,
            group_size=2,
            include_fewshot=False,
        )


def supervised(run: Run) -> None:
    builder = FromConversationFileBuilder(
        file_path=str(run.folder / "chats.jsonl"), test_size=2, common_config=run.chats
    )
    config = supervised_train.Config(**run.trainer, dataset_builder=builder, num_epochs=100, rolling_save_every=1)
    asyncio.run(supervised_train.main(config))


def reinforcement(run: Run, **mode: Any) -> None:
    config = rl_train.Config(**run.trainer, dataset_builder=run.sums, max_tokens=40, **mode)
    asyncio.run(rl_train.main(config))


def reinforcement_streaming(run: Run) -> None:
    streaming = rl_train.StreamMinibatchConfig(groups_per_batch=2, num_minibatches=2)
    reinforcement(run, stream_minibatch_config=streaming, kl_penalty_coef=0.1, kl_reference_config=reference(run))


def reinforcement_async(run: Run) -> None:
    ahead = rl_train.AsyncConfig(max_steps_off_policy=2, groups_per_batch=2, loss_fn="ppo")
    reinforcement(run, async_config=ahead)


def reinforcement_substeps(run: Run) -> None:
    reinforcement(run, loss_fn="ppo", num_substeps=2)


def reinforcement_cispo(run: Run) -> None:
    reinforcement(run, loss_fn="cispo", kl_penalty_coef=0.1, kl_reference_config=reference(run))


def reinforcement_stable(run: Run) -> None:
    """With the loss that the asynchronous mode takes by default."""
    reinforcement(run, async_config=rl_train.AsyncConfig(max_steps_off_policy=2, groups_per_batch=2))


def reference(run: Run) -> Any:
    return rl_train.KLReferenceConfig(base_model=run.model)


def preference(run: Run) -> None:
    pairs = ComparisonBuilderFromJsonl(train_path=str(run.folder / "comparisons.jsonl"))
    builder = DPODatasetBuilderFromComparisons(comparison_builder=pairs, common_config=run.chats)
    train_dpo.main(train_dpo.Config(**run.trainer, dataset_builder=builder, num_epochs=100))


def distillation(run: Run) -> None:
    teacher = TeacherConfig(base_model=run.model)
    taught = DistillationDatasetConfig(dataset_builder=run.sums, teacher_config=teacher, groups_per_batch=2)
    config = train_on_policy.Config(**run.trainer, dataset_configs=[taught], max_tokens=40)
    asyncio.run(train_on_policy.main(config))


def flat_supervised(run: Run) -> None:
    hub_rows(run.folder / "chats.jsonl")
    sl_loop.main(sl_loop.Config(**run.shared, batch_size=2, max_length=256))


def flat_reinforcement(run: Run) -> None:
    hub_rows(run.folder / "questions.jsonl")
    rl_loop.main(rl_loop.Config(**run.shared, batch_size=2, group_size=4, max_tokens=40, loss_fn="importance_sampling"))


def flat_reinforcement_stable(run: Run) -> None:
    """With the loss that this loop takes by default."""
    hub_rows(run.folder / "questions.jsonl")
    rl_loop.main(rl_loop.Config(**run.shared, batch_size=2, group_size=4, max_tokens=40))


def hub_rows(file: Path) -> None:
    """Both loops name a data set of the hub, and ask a table of the hub's models which renderer is theirs."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    datasets.load_dataset = lambda *_: found
    model_info.get_recommended_renderer_name = lambda model_name: RENDERER


RUNS = {
    "supervised": supervised,
    "reinforcement": reinforcement,
    "reinforcement_streaming": reinforcement_streaming,
    "reinforcement_async": reinforcement_async,
    "reinforcement_substeps": reinforcement_substeps,
    "reinforcement_cispo": reinforcement_cispo,
    "reinforcement_stable": reinforcement_stable,
    "preference": preference,
    "distillation": distillation,
    "flat_supervised": flat_supervised,
    "flat_reinforcement": flat_reinforcement,
    "flat_reinforcement_stable": flat_reinforcement_stable,
}

if __name__ == "__main__":
    name, folder, model, base_url, max_steps = sys.argv[1:]
    RUNS[name](Run(Path(folder), model, base_url or None, int(max_steps)))
