import asyncio
import pickle
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.errors import GradeError, InvalidRequest, UnknownName
from stovetop.preference.datasets import LabeledComparisons
from stovetop.preference.envs import (
    PairwisePreferenceDataset,
    PairwisePreferenceDatasetBuilder,
    PairwisePreferenceGroupBuilder,
    PreferenceEnv,
    TournamentPattern,
    get_pairs,
    get_pairs_chunked,
    win_minus_losses,
)
from stovetop.preference.types import Comparison
from stovetop.renderers.role_colon import RoleColonRenderer
from stovetop.rl.rollouts import do_group_rollout
from stovetop.rl.types import Trajectory, Transition
from stovetop.types import ModelInput

from .examples import RENDERER, Judge, labeled, said, texts

ONE_WAY, BOTH_WAYS = TournamentPattern.ALL_PAIRS_ONE_WAY, TournamentPattern.ALL_PAIRS_BOTH_WAYS
PROMPT = [said("user", "q")]


async def longer_wins(one: Comparison) -> float:
    first, second = map(len, texts(one))
    return float((second > first) - (second < first))


def answer(text: str, *, ended: bool = True) -> Trajectory:
    tokens = ByteTokenizer().encode(text + "<|im_end|>" * ended, add_special_tokens=False)
    action = TokensWithLogprobs(tokens, [0.0] * len(tokens), "stop" if ended else "length")
    return Trajectory([Transition(ModelInput.from_ints([1]), action, 0.0, True)], ModelInput.empty())


def builder(judge=longer_wins, num_envs: int = 3, **options) -> PairwisePreferenceGroupBuilder:
    return PairwisePreferenceGroupBuilder(PROMPT, RENDERER, judge, num_envs, **options)


def rewards(group_builder: PairwisePreferenceGroupBuilder, *answers: Trajectory):
    return asyncio.run(group_builder.compute_group_rewards(answers, []))


# ---- who meets whom ------------------------------------------------------------------------------------------


def test_three_players_meet_three_times_one_way_and_six_times_both_ways():
    assert get_pairs(3, ONE_WAY) == [(0, 1), (0, 2), (1, 2)]
    assert sorted(get_pairs(3, BOTH_WAYS)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert get_pairs(3, "all_pairs_one_way") == get_pairs(3, ONE_WAY)


def test_only_players_of_the_same_chunk_meet():
    assert get_pairs_chunked(6, ONE_WAY, 3) == [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)]
    assert get_pairs_chunked(4, ONE_WAY, 3) == [(0, 1), (0, 2), (1, 2)]  # the last one is alone


@given(st.integers(0, 12), st.integers(1, 5), st.sampled_from(TournamentPattern))
def test_matchups_are_between_two_different_players_of_a_chunk(num_players, chunk_size, pattern):
    pairs = get_pairs_chunked(num_players, pattern, chunk_size)
    assert len(set(pairs)) == len(pairs)
    assert all(a != b and a // chunk_size == b // chunk_size and max(a, b) < num_players for a, b in pairs)


def test_an_unknown_pattern_or_an_empty_chunk_is_refused():
    with pytest.raises(UnknownName, match="tournament pattern 'swiss'"):
        get_pairs(3, "swiss")
    with pytest.raises(InvalidRequest, match="matchup group size must be at least 1: 0"):
        get_pairs_chunked(3, ONE_WAY, 0)


# ---- rewards -------------------------------------------------------------------------------------------------


def test_of_three_ordered_players_the_rewards_are_minus_one_zero_and_one():
    pairs = get_pairs(3, BOTH_WAYS)
    assert win_minus_losses(3, pairs, [1.0 if second > first else -1.0 for first, second in pairs]) == [-1, 0, 1]


@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_wins_and_losses_stay_within_one_and_balance(num_players, chunk_size, data):
    pairs = get_pairs_chunked(num_players, BOTH_WAYS, chunk_size)
    scores = [data.draw(st.floats(-1, 1)) for _ in pairs]
    won = win_minus_losses(num_players, pairs, scores)
    assert all(-1.000001 <= one <= 1.000001 for one in won)
    for start in range(0, num_players, chunk_size):
        assert sum(won[start : start + chunk_size]) == pytest.approx(0, abs=1e-6)


def test_a_tournament_rewards_each_answer_and_says_how_it_went():
    assert rewards(builder(), answer("a"), answer("aa"), answer("aaa")) == [
        (-1.0, {"win_minus_loss": -1.0, "format": 1.0}),
        (0.0, {"win_minus_loss": 0.0, "format": 1.0}),
        (1.0, {"win_minus_loss": 1.0, "format": 1.0}),
    ]


def test_an_answer_that_was_cut_off_is_worth_one_less():
    (lost, _), (won, metrics) = rewards(builder(), answer("a"), answer("aaa", ended=False))
    assert (lost, won) == (-1.0, 0.0)
    assert metrics == {"win_minus_loss": 1.0, "format": 0.0}


def test_an_answer_is_valid_only_if_it_ends_as_the_family_ends_a_turn_and_the_sampler_says_so():
    whole, cut = answer("aaa").transitions[0], answer("aaa", ended=False).transitions[0]
    for turn in (
        replace(whole, ac=replace(whole.ac, stop_reason="length")),
        replace(cut, ac=replace(cut.ac, stop_reason="stop")),
    ):
        _, (won, metrics) = rewards(builder(), answer("a"), Trajectory([turn], ModelInput.empty()))
        assert (won, metrics["format"]) == (0.0, 0.0)


ROLE_COLON = RoleColonRenderer(ByteTokenizer())  # ends a turn by "\n\nUser:", which a base model may do by end-of-text


def test_an_answer_that_ends_with_the_end_of_text_is_worth_one_less_unless_that_end_will_do():
    def played(text: str) -> Trajectory:
        tokens = ByteTokenizer().encode(text, add_special_tokens=False)
        action = TokensWithLogprobs(tokens, [0.0] * len(tokens))
        return Trajectory([Transition(ModelInput.from_ints([1]), action, 0.0, True)], ModelInput.empty())

    def of(answers: list[Trajectory], **options: bool) -> list[float]:
        tournament = PairwisePreferenceGroupBuilder(PROMPT, ROLE_COLON, longer_wins, len(answers), **options)
        return [reward for reward, _ in asyncio.run(tournament.compute_group_rewards(answers, []))]

    by_text_end = [played(f" {text}<|im_end|>") for text in ("a", "aa", "aaa")]
    by_stop_sequence = [played(f" {text}\n\nUser:") for text in ("a", "aa", "aaa")]
    assert of(by_stop_sequence) == [-1.0, 0.0, 1.0]
    assert of(by_text_end) == [-2.0, -1.0, 0.0]
    assert of(by_text_end, require_stop_sequence_for_format=False) == [-1.0, 0.0, 1.0]
    assert of([by_text_end[0]]) == [-1.0]  # without a matchup
    assert of(by_stop_sequence[:1]) == [0.0]


@pytest.mark.parametrize("num_answers", [1, 5])
def test_an_answer_that_met_nobody_is_worth_nothing(num_answers):
    group = rewards(builder(), *[answer("a" * index) for index in range(num_answers)])
    assert group[-1] == (0.0, {"win_minus_loss": 0.0, "format": 1.0})


def test_what_the_judge_sees_is_preprocessed_on_both_sides():
    judge = Judge({("A", "BB"): 1.0, ("BB", "A"): -1.0})
    rewards(builder(judge, content_preprocessor=lambda content: content.upper()), answer("a"), answer("bb"))
    assert sorted(judge.asked) == [("A", "BB"), ("BB", "A")]


@dataclass
class Slow:
    """Counts how many comparisons it has before it at once."""

    now: int = 0
    most: int = 0
    prompts: list = field(default_factory=list)

    async def __call__(self, one: Comparison) -> float:
        self.now += 1
        self.most = max(self.most, self.now)
        self.prompts.append(one.prompt_conversation)
        await asyncio.sleep(0.001)
        self.now -= 1
        return 0.0


def test_all_matchups_are_judged_at_the_same_time():
    judge = Slow()
    rewards(builder(judge), *[answer("a")] * 4)
    assert judge.most == 12
    assert judge.prompts == [PROMPT] * 12


def test_a_judge_that_is_no_judge_stops_the_group():
    async def nan(one: Comparison) -> float:
        return float("nan")

    with pytest.raises(GradeError, match="from -1 to 1: nan"):
        rewards(builder(nan), answer("a"), answer("b"))


# ---- episodes ------------------------------------------------------------------------------------------------


def test_an_episode_is_one_answer_without_a_reward_of_its_own():
    async def policy(model_input, stop, *, max_tokens=None) -> TokensWithLogprobs:
        return TokensWithLogprobs([97, *stop], [-1.0, -1.0])

    group = asyncio.run(do_group_rollout(builder(num_envs=2), policy))
    assert [[turn.reward for turn in one.transitions] for one in group.trajectories_G] == [[0.0], [0.0]]
    assert group.trajectories_G[0].transitions[0].ob == RENDERER.build_generation_prompt(PROMPT)
    assert group.final_rewards_G == [0.0, 0.0]
    assert builder().logging_tags() == ["pairwise_preference"]


def test_environments_pickle():
    env = pickle.loads(pickle.dumps(PreferenceEnv(PROMPT, RENDERER)))
    observation, stop = asyncio.run(env.initial_observation())
    assert observation == RENDERER.build_generation_prompt(PROMPT)
    assert stop == RENDERER.get_stop_sequences()


# ---- datasets ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """Comparisons without a source."""

    num_train: int
    num_test: int

    def get_labeled_comparisons(self) -> LabeledComparisons:
        train = [labeled("A", f"q{index}") for index in range(self.num_train)]
        return LabeledComparisons(train, [labeled("B", f"t{index}") for index in range(self.num_test)], 0)


def test_a_dataset_has_batches_of_builders_one_for_each_prompt():
    make = partial(PairwisePreferenceGroupBuilder, policy_renderer=RENDERER, preference_model=longer_wins, num_envs=2)
    comparisons = Ready(5, 0).get_labeled_comparisons().train
    dataset = PairwisePreferenceDataset(comparisons, 2, make, num_epochs=3)
    assert len(dataset) == 9
    prompts = [one.convo_prefix[0]["content"] for index in (0, 1) for one in dataset.get_batch(index)]
    assert len(set(prompts)) == 4
    assert [one.convo_prefix for one in dataset.get_batch(0)] == [one.convo_prefix for one in dataset.get_batch(0)]


def test_a_dataset_builder_passes_on_what_it_was_told():
    config = PairwisePreferenceDatasetBuilder(
        comparison_builder=Ready(4, 3),
        preference_model=longer_wins,
        policy_renderer=RENDERER,
        groups_per_batch=4,
        group_size=6,
        tournament_pattern=ONE_WAY,
        matchup_group_size=3,
        require_stop_sequence_for_format=False,
    )
    train, test = asyncio.run(config())
    [first, *_] = train.get_batch(0)
    assert not first.require_stop_sequence_for_format
    assert (first.num_envs, first.tournament_pattern, first.matchup_group_size) == (6, ONE_WAY, 3)
    assert (len(train), len(test), len(test.get_batch(0))) == (1, 1, 3)
