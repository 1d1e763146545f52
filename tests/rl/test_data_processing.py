import logging
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.completers import TokensWithLogprobs
from stovetop.errors import InvalidRequest
from stovetop.input_checks import ModelLimits, check_data
from stovetop.losses import parse_loss
from stovetop.rl.advantages import GAE, compute_advantages
from stovetop.rl.data_processing import (
    DatumMetadata,
    all_same,
    assemble_training_data,
    remove_constant_reward_groups,
    trajectory_to_data,
    without_mask,
)
from stovetop.rl.types import Trajectory, TrajectoryGroup, Transition
from stovetop.types import Datum, EncodedTextChunk, ImageChunk, ModelInput

from .scripted import group, trajectory

IMAGE = ImageChunk(b"picture", "png", expected_tokens=3)
LIMITS = ModelLimits("a model", vocab_size=1000, context_length=10_000)

tokens = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def values(datum: Datum, name: str) -> list[float]:
    return datum.loss_fn_inputs[name].tolist()


def test_turns_that_extend_each_other_become_one_datum_and_a_reset_begins_another():
    data = trajectory_to_data(trajectory(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([9], [7])), 2.0)
    assert [datum.model_input for datum in data] == [ModelInput.from_ints([1, 2, 3, 4, 5]), ModelInput.from_ints([9])]
    assert [values(datum, "target_tokens") for datum in data] == [[2, 3, 4, 5, 6], [7]]
    assert [values(datum, "advantages") for datum in data] == [[0, 2, 0, 2, 2], [2]]
    assert [values(datum, "mask") for datum in data] == [[0, 1, 0, 1, 1], [1]]
    assert [values(datum, "logprobs") for datum in data] == [[0, -1, 0, -1, -1], [-1]]


def test_an_observation_that_takes_back_an_answer_begins_a_new_datum():
    data = trajectory_to_data(trajectory(([1, 2], [3]), ([1, 2, 8, 4], [5])), 1.0)
    assert [datum.model_input.to_ints() for datum in data] == [[1, 2], [1, 2, 8, 4]]


def test_logprobs_stay_with_their_tokens():
    action = TokensWithLogprobs([4, 5], [-0.25, -0.5], "length")
    alone = Trajectory([Transition(ModelInput.from_ints([1, 2, 3]), action, 0.0, True)], ModelInput.empty())
    [datum] = trajectory_to_data(alone, 1.0)
    assert values(datum, "target_tokens") == [2, 3, 4, 5]
    assert values(datum, "logprobs") == [0, 0, -0.25, -0.5]


def test_an_action_without_logprobs_is_refused():
    action = TokensWithLogprobs([4], None, "stop")
    with pytest.raises(InvalidRequest, match="logprobs"):
        trajectory_to_data(
            Trajectory([Transition(ModelInput.from_ints([1]), action, 0.0, True)], ModelInput.empty()), 1.0
        )


def test_images_stay_chunks_and_have_no_advantage():
    def seen(*chunks: EncodedTextChunk | ImageChunk) -> ModelInput:
        return ModelInput(chunks)

    first = seen(EncodedTextChunk([1, 2]), IMAGE, EncodedTextChunk([3]))
    second = seen(EncodedTextChunk([1, 2]), IMAGE, EncodedTextChunk([3, 4, 5]), IMAGE, EncodedTextChunk([6]))
    other_image = seen(EncodedTextChunk([1, 2]), ImageChunk(b"other", "png", expected_tokens=3), EncodedTextChunk([3]))

    def turn(observation: ModelInput, token: int) -> Transition:
        return Transition(observation, TokensWithLogprobs([token], [-1.0], "stop"), 0.0, token == 8)

    data = trajectory_to_data(
        Trajectory([turn(first, 4), turn(second, 7), turn(other_image, 8)], ModelInput.empty()), 2.0
    )
    assert len(data) == 2  # the image is compared, not skipped
    assert data[0].model_input == second
    assert values(data[0], "mask") == [0] * 5 + [1] + [0] * 5 + [1]
    assert values(data[0], "advantages") == [0] * 5 + [2] + [0] * 5 + [2]
    assert len(values(data[0], "target_tokens")) == data[0].model_input.length == 12


def test_a_turn_without_action_tokens_is_left_out():
    assert trajectory_to_data(trajectory(([1, 2], [])), 1.0) == []
    with_two_empty_turns = trajectory(([1, 2], []), ([1, 2, 3], [4]), ([9, 9], []))
    assert trajectory_to_data(with_two_empty_turns, 1.0) == trajectory_to_data(trajectory(([1, 2, 3], [4])), 1.0)


@given(st.lists(st.tuples(st.booleans(), tokens, tokens), min_size=1, max_size=6), st.floats(-2, 2, width=32))
def test_every_action_token_is_a_target_once_with_its_advantage(
    turns: list[tuple[bool, list[int], list[int]]], advantage
):
    pairs: list[tuple[list[int], list[int]]] = []
    for extends, more, answer in turns:
        pairs.append(([*pairs[-1][0], *pairs[-1][1], *more] if extends and pairs else more, answer))
    data = trajectory_to_data(trajectory(*pairs), advantage)
    trained = [
        token
        for datum in data
        for token, mask in zip(values(datum, "target_tokens"), values(datum, "mask"), strict=True)
        if mask
    ]
    assert trained == [token for _, answer in pairs for token in answer]
    for datum in data:
        assert values(datum, "advantages") == [advantage * mask for mask in values(datum, "mask")]
    check_data(without_mask(data), parse_loss("importance_sampling"), LIMITS)


def test_a_long_episode_takes_time_in_proportion_to_its_length():
    def seconds(num_tokens: int) -> float:
        one_turn = trajectory(([1], [2] * num_tokens))
        times: list[float] = []
        for _ in range(7):
            start = time.perf_counter()
            trajectory_to_data(one_turn, 1.0)
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(40_000) < 60 * seconds(4_000)  # 10 times as long when linear, 100 times when quadratic


def test_each_datum_knows_its_group_and_trajectory():
    reset_twice = trajectory(([1], [2]), ([3], [4]))
    groups = [group(1, 0), TrajectoryGroup([trajectory(([5], [6])), reset_twice], [0, 0], [{}, {}])]
    data_D, metadata_D = assemble_training_data(groups, [[0.5, -0.5], [0.25, -0.25]])
    assert [(origin.group_idx, origin.traj_idx) for origin in metadata_D] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 1)]
    assert [max(values(datum, "advantages"), key=abs) for datum in data_D] == [0.5, -0.5, 0.25, -0.25, -0.25]
    assert metadata_D[-1] == DatumMetadata(group_idx=1, traj_idx=1)


@pytest.mark.parametrize("advantages_P_G", [[[0.5, -0.5]], [[0.5], [0.0, 0.0]]])
def test_advantages_must_match_groups_and_trajectories(advantages_P_G: list[list[float]]):
    with pytest.raises(ValueError, match="zip"):
        assemble_training_data([group(1, 0), group(1, 0)], advantages_P_G)


def test_the_mask_is_kept_from_the_losses_and_the_data_is_not_changed():
    data = trajectory_to_data(trajectory(([1, 2], [3])), 1.0)
    [sent] = without_mask(data)
    assert sorted(sent.loss_fn_inputs) == ["advantages", "logprobs", "target_tokens"]
    assert sent.model_input == data[0].model_input
    assert sorted(data[0].loss_fn_inputs) == ["advantages", "logprobs", "mask", "target_tokens"]


def test_a_group_that_goes_takes_its_owner_with_it():
    owned = [("easy", group(1, 1)), ("hard", group(1, 0)), ("mid", group(0, 1, 1))]
    assert remove_constant_reward_groups(owned) == owned[1:]


def test_when_every_group_is_constant_the_first_stays_and_a_warning_says_so(caplog: pytest.LogCaptureFixture):
    owned = [("easy", group(1, 1)), ("hard", group(0, 0))]
    with caplog.at_level(logging.WARNING):
        assert remove_constant_reward_groups(owned) == owned[:1]
    assert "no gradient" in caplog.text


def test_no_groups_stay_no_groups():
    assert remove_constant_reward_groups([]) == []


def test_all_of_none_are_the_same():
    assert all_same([])
    assert all_same([1.0, 1.0])
    assert not all_same([1.0, 2.0])


# ---- turns -------------------------------------------------------------------------------------------------------


def test_each_turn_can_have_an_advantage_of_its_own():
    [datum] = trajectory_to_data(trajectory(([1, 2], [3]), ([1, 2, 3, 4], [5, 6])), [2.0, -1.0])
    assert values(datum, "advantages") == [0, 2, 0, -1, -1]


def test_advantages_of_turns_stay_with_them_across_a_reset_and_past_an_empty_action():
    data = trajectory_to_data(trajectory(([1, 2], [3]), ([5], []), ([9], [7])), [2.0, 8.0, -1.0])
    assert [values(datum, "advantages") for datum in data] == [[0, 2], [-1]]


def test_there_must_be_one_advantage_per_turn():
    with pytest.raises(ValueError, match="zip"):
        trajectory_to_data(trajectory(([1, 2], [3]), ([1, 2, 3, 4], [5])), [2.0])


def test_advantages_of_turns_reach_the_data_of_a_batch():
    two_turns = TrajectoryGroup([trajectory(([1], [2]), ([1, 2, 3], [4]), reward=1.0)], [0.0], [{}])
    advantages = compute_advantages([two_turns], GAE(gamma=0.5, lam=1.0, baseline="zero"))
    [datum], _ = assemble_training_data([two_turns], advantages)
    assert values(datum, "advantages") == [0.5, 0, 1]


def not_trainable(turns: Trajectory, *numbers: int) -> Trajectory:
    return replace(
        turns,
        transitions=[
            replace(turn, trainable=number not in numbers) for number, turn in enumerate(turns.transitions, start=1)
        ],
    )


def test_an_action_that_is_not_trainable_counts_as_observed():
    turns = trajectory(([1, 2], [3]), ([1, 2, 3, 4], [5, 6]))
    [datum] = trajectory_to_data(not_trainable(turns, 1), 2.0)
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5]
    assert values(datum, "mask") == [0, 0, 0, 1, 1]
    assert values(datum, "advantages") == [0, 0, 0, 2, 2]
    assert values(datum, "logprobs") == [0, 0, 0, -1, -1]


def test_a_sequence_in_which_nothing_trains_is_left_out():
    reset = trajectory(([1, 2], [3]), ([9], [7]))
    assert [datum.model_input.to_ints() for datum in trajectory_to_data(not_trainable(reset, 1), 1.0)] == [[9]]
    assert trajectory_to_data(not_trainable(reset, 1, 2), 1.0) == []


# ---- images ------------------------------------------------------------------------------------------------------

images = st.sampled_from([IMAGE, ImageChunk(b"other", "png", expected_tokens=2)])
pieces = st.lists(st.one_of(images, tokens.map(EncodedTextChunk)), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.booleans(), pieces, tokens), min_size=1, max_size=5))
def test_turns_merge_while_they_extend_each_other_also_with_images(turns: list[tuple[bool, list, list[int]]]):
    chunks: list[EncodedTextChunk | ImageChunk] = []
    transitions: list[Transition] = []
    num_begun = 0
    for extends, more, answer in turns:
        anew = not (extends and transitions)
        num_begun += anew
        marker = EncodedTextChunk([100 + num_begun])  # no episode begins as another goes on
        chunks = [marker, *more] if anew else [*chunks, *more]
        transitions.append(Transition(ModelInput(chunks), TokensWithLogprobs(answer, [-1.0] * len(answer)), 0, False))
        chunks = [*chunks, EncodedTextChunk(answer)]
    data = trajectory_to_data(Trajectory(transitions, ModelInput.empty()), 1.0)
    assert len(data) == num_begun
    assert sum(sum(values(datum, "mask")) for datum in data) == sum(len(answer) for _, _, answer in turns)
    last = data[-1].model_input.append_int(int(values(data[-1], "target_tokens")[-1]))
    assert flat(last) == flat(ModelInput(chunks))
    for datum in data:
        assert {len(values(datum, name)) for name in datum.loss_fn_inputs} == {datum.model_input.length}


def flat(model_input: ModelInput) -> list[int | ImageChunk]:
    """Its tokens and images, however they are cut into chunks."""
    return [
        element
        for chunk in model_input.chunks
        for element in ([chunk] if isinstance(chunk, ImageChunk) else chunk.tokens)
    ]


def test_an_image_where_an_answer_was_begins_a_new_datum():
    first = Transition(ModelInput([EncodedTextChunk([1])]), TokensWithLogprobs([2], [-1.0]), 0.0, False)
    second = Transition(ModelInput([EncodedTextChunk([1]), IMAGE]), TokensWithLogprobs([3], [-1.0]), 0.0, True)
    assert len(trajectory_to_data(Trajectory([first, second], ModelInput.empty()), 1.0)) == 2
