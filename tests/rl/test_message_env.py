import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.errors import EnvError
from stovetop.renderers.messages import Message, get_text_content
from stovetop.renderers.role_colon import RoleColonRenderer
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.data_processing import trajectory_to_data
from stovetop.rl.limits import ParseErrorPolicy
from stovetop.rl.message_env import EnvFromMessageEnv, MessageStepResult
from stovetop.rl.rollouts import do_single_rollout
from stovetop.rl.types import Action, StopReason, Trajectory
from stovetop.types import ModelInput

AB = 300  # a token of two letters, which the tokenizer below never writes itself


class SpellsOut(ByteTokenizer):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        spelled = [byte for token in token_ids for byte in (b"ab" if token == AB else [token])]
        return super().decode(spelled, skip_special_tokens=skip_special_tokens)


TOKENIZER = SpellsOut()
RENDERER = ChatTemplateRenderer(TOKENIZER)
IM_END = TOKENIZER.eos_token_id


@dataclass
class Parrot:
    """Answers "You said ..."; done after `num_turns` messages, each with a reward of 1. It may forget its chat."""

    num_turns: int = 3
    forgets: bool = False
    heard: list[str] = field(default_factory=list[str])
    chat: list[Message] = field(default_factory=list[Message])

    async def initial_observation(self) -> Sequence[Message]:
        self.chat = [Message(role="user", content="Hello")]
        return list(self.chat)

    async def step(self, message: Message) -> MessageStepResult:
        self.heard.append(get_text_content(message))
        reply = Message(role="user", content=f"You said {self.heard[-1]}")
        self.chat = [reply] if self.forgets else [*self.chat, message, reply]
        return MessageStepResult(1.0, len(self.heard) == self.num_turns, list(self.chat), {"heard": len(self.heard)})


def says(text: str, *, ended: bool = True) -> Action:
    tokens = TOKENIZER.encode(text, add_special_tokens=False) + [IM_END] * ended
    return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "stop" if ended else "length")


class Script:
    """A policy that says what stands in a list, and remembers what it was shown and how long it could have answered."""

    def __init__(self, *answers: Action) -> None:
        self.answers = list(answers)
        self.shown: list[str] = []

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.shown.append(TOKENIZER.decode(model_input.to_ints()))
        return self.answers[len(self.shown) - 1]


def play(env: EnvFromMessageEnv, *answers: Action) -> tuple[Trajectory, Script]:
    policy = Script(*answers)
    return asyncio.run(do_single_rollout(policy, env)), policy


# ---- messages and tokens -------------------------------------------------------------------------------------------


def test_a_message_environment_hears_what_the_tokens_say_and_shows_its_chat():
    parrot = Parrot()
    trajectory, policy = play(EnvFromMessageEnv(parrot, RENDERER), says("a"), says("b"), says("c"))
    assert parrot.heard == ["a", "b", "c"]
    assert policy.shown[1] == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nYou said a<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [turn.reward for turn in trajectory.transitions] == [1.0, 1.0, 1.0]
    assert trajectory.transitions[1].metrics == {"parse_error": 0.0, "heard": 2}
    assert trajectory.stop_reason is StopReason.COMPLETED


def test_the_turns_of_an_episode_become_one_datum():
    trajectory, _ = play(EnvFromMessageEnv(Parrot(), RENDERER), says("a"), says("b"), says("c"))
    [datum] = trajectory_to_data(trajectory, 2.0)
    assert datum.loss_fn_inputs["mask"].array.sum() == 3 * 2
    assert datum.loss_fn_inputs["advantages"].array.sum() == 2.0 * 3 * 2


def test_tokens_that_a_renderer_would_write_otherwise_are_kept_as_they_were_sampled():
    sampled = TokensWithLogprobs([AB, IM_END], [-1.0, -1.0], "stop")
    trajectory, policy = play(EnvFromMessageEnv(Parrot(2), RENDERER), sampled, sampled)
    first, second = trajectory.transitions
    tokens = [*first.ob.to_ints(), AB, IM_END]
    assert second.ob.to_ints()[: len(tokens)] == tokens
    assert policy.shown[1].endswith("You said ab<|im_end|>\n<|im_start|>assistant\n")
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


def test_a_chat_that_the_environment_rewrites_is_rendered_anew():
    trajectory, policy = play(EnvFromMessageEnv(Parrot(2, forgets=True), RENDERER), says("a"), says("b"))
    assert policy.shown[1] == "<|im_start|>user\nYou said a<|im_end|>\n<|im_start|>assistant\n"
    assert len(trajectory_to_data(trajectory, 1.0)) == 2


def test_a_renderer_with_stop_strings_shows_the_same_chat():
    env = EnvFromMessageEnv(Parrot(2), RoleColonRenderer(TOKENIZER))
    answer = TOKENIZER.encode(" a\n\nUser:", add_special_tokens=False)
    sampled = TokensWithLogprobs(answer, [-1.0] * len(answer), "stop")
    trajectory, policy = play(env, sampled, sampled)
    assert policy.shown[1].endswith("User: Hello\n\nAssistant: a\n\nUser: You said a\n\nAssistant:")
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


# ---- answers that cannot be read -----------------------------------------------------------------------------------

GOES_ON = TokensWithLogprobs([*says("a").tokens, 65], [-1.0] * 3, "stop")  # after its end


def test_an_answer_that_cannot_be_read_ends_the_episode():
    parrot = Parrot()
    trajectory, _ = play(EnvFromMessageEnv(parrot, RENDERER), says("a"), GOES_ON)
    assert [turn.reward for turn in trajectory.transitions] == [1.0, -1.0]
    assert trajectory.transitions[1].metrics == {"parse_error": 1.0}
    assert trajectory.stop_reason is StopReason.PARSE_ERROR
    assert parrot.heard == ["a"]
    assert all(turn.trainable for turn in trajectory.transitions)


def forgiving(max_consecutive: int, *, masks: bool = False) -> EnvFromMessageEnv:
    policy = ParseErrorPolicy(max_consecutive=max_consecutive, penalty=-0.25, reply="What?", mask_error_turns=masks)
    return EnvFromMessageEnv(Parrot(2), RENDERER, terminate_on_parse_error=False, parse_errors=policy)


def test_a_policy_that_is_forgiven_is_told_and_tries_again():
    trajectory, policy = play(forgiving(1), GOES_ON, says("a"), GOES_ON, says("b"))
    assert [turn.reward for turn in trajectory.transitions] == [-0.25, 1.0, -0.25, 1.0]
    assert policy.shown[1].endswith("a<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.stop_reason is StopReason.COMPLETED


def test_more_errors_in_a_row_than_are_forgiven_end_the_episode():
    trajectory, _ = play(forgiving(1), GOES_ON, GOES_ON)
    assert [turn.reward for turn in trajectory.transitions] == [-0.25, -1.0]
    assert trajectory.stop_reason is StopReason.PARSE_ERROR


@pytest.mark.parametrize("masks", [False, True])
def test_turns_that_cannot_be_read_may_be_left_out_of_training(masks: bool):
    trajectory, _ = play(forgiving(1, masks=masks), GOES_ON, says("a"), GOES_ON, GOES_ON)
    assert [turn.trainable for turn in trajectory.transitions] == [not masks, True, not masks, not masks]
    num_trained = sum(datum.loss_fn_inputs["mask"].array.sum() for datum in trajectory_to_data(trajectory, 1.0))
    assert num_trained == (2 if masks else 2 + 3 * 3)


# ---- length --------------------------------------------------------------------------------------------------------


def test_an_answer_that_is_cut_off_ends_the_episode_with_a_reward_of_its_own():
    trajectory, _ = play(EnvFromMessageEnv(Parrot(), RENDERER), says("a", ended=False))
    assert [turn.reward for turn in trajectory.transitions] == [-0.1]
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


def test_an_answer_that_is_cut_off_may_be_read_like_any_other_which_is_an_error_here():
    trajectory, _ = play(EnvFromMessageEnv(Parrot(), RENDERER, terminate_on_length=False), says("a", ended=False))
    assert trajectory.stop_reason is StopReason.PARSE_ERROR


def test_a_chat_that_leaves_no_room_for_an_answer_ends_the_episode():
    first = RENDERER.build_generation_prompt([Message(role="user", content="Hello")]).length
    env = EnvFromMessageEnv(Parrot(), RENDERER, max_trajectory_tokens=first + 20, max_generation_tokens=10)
    trajectory, _ = play(env, says("a"))
    assert [turn.reward for turn in trajectory.transitions] == [1.0 - 0.1]
    assert trajectory.transitions[0].metrics["context_overflow"] == 1.0
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW


@pytest.mark.parametrize(("room", "needed", "fits"), [(1, None, True), (0, None, False), (7, 7, True), (6, 7, False)])
def test_a_chat_may_leave_exactly_the_room_that_an_answer_needs(room: int, needed: int | None, fits: bool):
    chat = [Message(role="user", content="Hello"), Message(role="assistant", content="a")]
    chat.append(Message(role="user", content="You said a"))
    limit = RENDERER.build_generation_prompt(chat).length + room
    env = EnvFromMessageEnv(Parrot(2), RENDERER, max_trajectory_tokens=limit, max_generation_tokens=needed)
    trajectory, _ = play(env, says("a"), says("b"))
    assert trajectory.stop_reason is (StopReason.COMPLETED if fits else StopReason.CONTEXT_OVERFLOW)
    assert len(trajectory.transitions) == (2 if fits else 1)


def test_a_first_chat_that_leaves_no_room_is_an_error():
    env = EnvFromMessageEnv(Parrot(), RENDERER, max_trajectory_tokens=10)
    with pytest.raises(EnvError, match="leaves no room for an answer; max_trajectory_tokens"):
        play(env, says("a"))
