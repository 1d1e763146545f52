"""Guessing a number: two phases, a game as one datum, and that a model learns to play."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.cli import main
from stovetop.completers import TokensWithLogprobs
from stovetop.errors import InvalidRequest
from stovetop.kitchen import stage
from stovetop.kitchen.phases import check_phases
from stovetop.recipes import guess_number
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.message_env import MessageStepResult
from stovetop.rl.types import StepResult, StopReason
from stovetop.runs import load
from stovetop.tasks.guess_number import GuessNumberEnv, GuessNumberGroupBuilder, example_games, numbers

TOKENIZER = ByteTokenizer()
RENDERER = ChatTemplateRenderer(TOKENIZER)

WORDS = ["run", "guess_number", "base_url=recording", "model=any/model", "num_numbers=8", "test_size=2",
         "max_tokens=8", "num_games=64", "attention=0", "games_learning_rate=0.5", "groups_per_batch=2",
         "group_size=16", "learning_rate=1.0", "num_epochs=2", "eval_every=6"]  # fmt: skip


def own(log_path: Path) -> dict[str, list[dict[str, float]]]:
    """The rows of each phase, without the clock."""
    return {
        name: [
            {key: value for key, value in row.items() if not key.startswith("time/")}
            for row in load(log_path / name).metrics
        ]
        for name in ("1_supervised", "2_reinforcement")
    }


def weights(log_path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(log_path.glob("**/final/*.safetensors"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of games that are shown, six of games that are played: a second."""
    log_path = tmp_path_factory.mktemp("guess") / "run"
    assert main([*WORDS, f"log_path={log_path}"]) == 0
    return log_path


def test_a_model_is_shown_games_and_learns_to_play_from_reward(trained: Path) -> None:
    shown, played = own(trained).values()
    assert shown[-1]["train_mean_nll"] < shown[0]["train_mean_nll"] - 1
    rewards = [row["env/all/reward/total"] for row in played if "env/all/reward/total" in row]
    assert sum(rewards[:2]) / 2 < 0
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.5


def test_a_game_is_one_datum_whatever_its_turns(trained: Path) -> None:
    played = load(trained / "2_reinforcement")
    batches = [event.values for event in played.events if event.name == "rl.batch_assembled"]
    assert len(batches) == 6
    for values, row in zip(batches, played.metrics, strict=False):
        assert row["env/all/turns_per_episode"] > 1
        assert values["num_datums"] == 2 * 16


@pytest.mark.slow  # test_conformance has a short one
@pytest.mark.parametrize(("phase", "step"), [(0, 2), (1, 3)])
def test_a_run_that_is_interrupted_in_either_phase_goes_on_in_it(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: int, step: int
) -> None:
    words = [*WORDS, "save_every=2", f"log_path={tmp_path / 'run'}"]

    @stage
    def dies(step: int) -> None:
        if step == at:
            raise RuntimeError("power cut")

    at, phases = step, list(guess_number.PHASES)
    with monkeypatch.context() as patched:
        phases[phase] = replace(phases[phase], workflow=phases[phase].workflow.insert_after("log_step", dies))
        patched.setattr(guess_number, "PHASES", phases)
        assert main(words) == 1
    assert main(words) == 0
    assert own(tmp_path / "run") == own(trained)
    assert weights(tmp_path / "run") == weights(trained) != []


# ---- the games that are shown ----------------------------------------------------------------------------------------


def play(chat: list[Message], number: int) -> list[MessageStepResult]:
    """What the environment says to the guesses of a chat."""

    async def steps() -> list[MessageStepResult]:
        env = GuessNumberEnv(number, 16, 5)
        assert list(await env.initial_observation()) == chat[:1]
        return [await env.step(message) for message in chat if message["role"] == "assistant"]

    return asyncio.run(steps())


def test_example_games_are_games_as_the_environment_plays_them() -> None:
    for chat in example_games([5], 20, num_numbers=16, max_turns=5, attention=0.5, seed=1):
        results = play(chat, 5)
        assert [result.episode_done for result in results] == [False] * (len(results) - 1) + [True]
        assert results[-2].next_messages == chat[:-1] if len(results) > 1 else len(chat) == 2


def test_the_player_who_heeds_every_hint_wins_more_and_one_who_heeds_none_guesses_blindly() -> None:
    def won(attention: float) -> float:
        hidden = numbers(16, 4).train
        games = example_games(hidden, 400, num_numbers=16, max_turns=5, attention=attention, seed=2)
        return sum(len(chat) < 10 for chat in games) / len(games)

    assert won(0.0) < 0.35 < won(0.5) < won(1.0)
    assert example_games([1, 2], 9, seed=3) == example_games([1, 2], 9, seed=3)


def test_no_game_that_is_shown_hides_a_number_that_is_held_out() -> None:
    split = numbers(16, 4)
    assert (len(split.train), len(split.test)) == (12, 4)
    hit = {str(chat[-1]["content"]) for chat in example_games(split.train, 300, num_numbers=16, attention=1.0)}
    assert hit <= {str(number) for number in split.train}


def test_a_game_that_outgrows_the_context_ends() -> None:
    async def first_guess(max_prompt_tokens: int | None) -> StepResult:
        [env] = await GuessNumberGroupBuilder(5, RENDERER, 1, max_prompt_tokens=max_prompt_tokens).make_envs()
        await env.initial_observation()
        return await env.step(TokensWithLogprobs([*b"9", TOKENIZER.eos_token_id], [0.0, 0.0], "stop"))

    assert not asyncio.run(first_guess(None)).episode_done
    assert asyncio.run(first_guess(200)).stop_reason is StopReason.CONTEXT_OVERFLOW


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_without_games_there_is_one_phase_from_the_weights_that_the_config_names(tmp_path: Path) -> None:
    config = guess_number.Config(base_url="recording", log_path=str(tmp_path / "run"), load_checkpoint_path="x")
    first, second = check_phases(guess_number.PHASES, config)
    assert first.config is None
    assert isinstance(second.config, guess_number.PlayConfig)
    assert second.config.load_checkpoint_path == "x"
    first, second = check_phases(guess_number.PHASES, replace(config, num_games=8))
    assert isinstance(first.config, guess_number.ShowConfig)
    assert first.config.load_checkpoint_path == "x"
    assert isinstance(second.config, guess_number.PlayConfig)
    assert second.config.load_checkpoint_path == f"{tmp_path}/run/1_supervised: state, will exist"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"test_size": 8}, "test_size must leave"),
        ({"loss_fn": "cross_entropy"}, "loss_fn must be"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = guess_number.Config(
        num_numbers=8, test_size=2, groups_per_batch=2, base_url="recording", log_path=str(tmp_path / "run")
    )
    guess_number.check(config)
    with pytest.raises(InvalidRequest, match=named):
        guess_number.check(replace(config, **changed))
    assert list(tmp_path.iterdir()) == []


def test_the_published_defaults_are_kept() -> None:
    config = guess_number.Config()
    assert (config.model_name, config.num_numbers, config.max_turns) == ("Qwen/Qwen3.5-4B", 1024, 10)
    assert (config.group_size, config.groups_per_batch, config.learning_rate, config.max_tokens) == (8, 32, 3e-5, 64)
    assert (config.eval_every, config.save_every, config.num_games) == (5, 20, 0)
