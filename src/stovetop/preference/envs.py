"""Reinforcement learning from preferences: the answers of a group are compared with each other, and the reward of each
is how often it wins. Who judges is a preference model's business.

Shape suffixes: `P` problems, `G` members of a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, permutations

from stovetop.completers import StopCondition
from stovetop.concurrency import map_together
from stovetop.datasets import Batches
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.preference.datasets import ComparisonDatasetBuilder
from stovetop.preference.reward_model import PreferenceModel, checked_score
from stovetop.preference.types import Comparison, LabeledComparison
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Content, Message
from stovetop.rl.problem_env import end_of_one_turn
from stovetop.rl.types import Action, Env, EnvGroupBuilder, Metrics, Observation, StepResult, Trajectory
from stovetop.tracking.chats import ConversationFormatter
from stovetop.tracking.logtree import log_formatter
from stovetop.types import ModelInput


class TournamentPattern(StrEnum):
    """Who meets whom."""

    ALL_PAIRS_ONE_WAY = "all_pairs_one_way"  # each two once, the one of the lower index as A
    ALL_PAIRS_BOTH_WAYS = "all_pairs_both_ways"  # each two twice, in both orders

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise UnknownName("tournament pattern", str(value), [pattern.value for pattern in cls])


def get_pairs(num_players: int, pattern: TournamentPattern) -> list[tuple[int, int]]:
    """The matchups of players 0 to num_players - 1."""
    match TournamentPattern(pattern):
        case TournamentPattern.ALL_PAIRS_ONE_WAY:
            return list(combinations(range(num_players), 2))
        case TournamentPattern.ALL_PAIRS_BOTH_WAYS:
            return list(permutations(range(num_players), 2))


def get_pairs_chunked(num_players: int, pattern: TournamentPattern, chunk_size: int) -> list[tuple[int, int]]:
    """The matchups when only players of the same chunk meet: 0 to chunk_size - 1, and so on. The number of matchups is
    then linear in that of players. A last chunk may be smaller, and a player alone in it has no matchup."""
    if chunk_size < 1:
        raise InvalidRequest(f"the matchup group size must be at least 1: {chunk_size}")
    return [
        (start + first, start + second)
        for start in range(0, num_players, chunk_size)
        for first, second in get_pairs(min(chunk_size, num_players - start), pattern)
    ]


@dataclass(frozen=True, slots=True)
class PreferenceEnv:
    """Puts a prompt to the policy and takes one answer, for no reward: that comes from the group."""

    convo_prefix: Sequence[Message]
    renderer: Renderer

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        log_formatter(ConversationFormatter(self.convo_prefix))
        return self.renderer.build_generation_prompt(self.convo_prefix), self.renderer.get_stop_sequences()

    async def step(self, action: Action) -> StepResult:
        return StepResult(
            reward=0.0,
            episode_done=True,
            next_observation=ModelInput.empty(),
            next_stop_condition=self.renderer.get_stop_sequences(),
            stop_reason=end_of_one_turn(action),
        )


@dataclass(frozen=True, slots=True)
class _Player:
    """One answer, and whether the policy ended it as it should."""

    message: Message
    is_valid: bool


@dataclass(frozen=True, slots=True)
class PairwisePreferenceGroupBuilder(EnvGroupBuilder):
    """The same prompt several times, and a tournament of the answers. All matchups are judged at the same time.

    The reward of an answer is (wins - losses) / matchups, 0 for one without a matchup, and 1 less if its format is bad:
    if the policy did not end it with the renderer's stop sequence. The end-of-text token will do as well with
    `require_stop_sequence_for_format=False`. Of three answers in their order of merit the rewards are -1, 0 and 1.

    It pickles if its preference model does; its environments always do.
    """

    convo_prefix: Sequence[Message]
    policy_renderer: Renderer
    preference_model: PreferenceModel
    num_envs: int
    tournament_pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS
    matchup_group_size: int = 4  # only so many neighbours meet each other
    content_preprocessor: Callable[[Content], Content] | None = None  # of each answer, such as `remove_thinking`
    dataset_name: str = "pairwise_preference"  # the tag
    require_stop_sequence_for_format: bool = True  # False: an answer that ended with the end-of-text token may pass

    async def make_envs(self) -> Sequence[Env]:
        return [PreferenceEnv(self.convo_prefix, self.policy_renderer) for _ in range(self.num_envs)]

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        players_G = [self._player(trajectory) for trajectory in trajectories_G]
        pairs = get_pairs_chunked(len(players_G), self.tournament_pattern, self.matchup_group_size)
        scores = await map_together(
            lambda pair: self._judge(players_G[pair[0]], players_G[pair[1]]), pairs, name="matchup"
        )
        return [
            (win_minus_loss + player.is_valid - 1, {"win_minus_loss": win_minus_loss, "format": float(player.is_valid)})
            for player, win_minus_loss in zip(players_G, win_minus_losses(len(players_G), pairs, scores), strict=True)
        ]

    def logging_tags(self) -> Sequence[str]:
        return [self.dataset_name]

    def _player(self, trajectory: Trajectory) -> _Player:
        action = trajectory.transitions[-1].ac
        message, termination = self.policy_renderer.parse_response(action.tokens)
        if self.content_preprocessor is not None:
            message = Message(role="assistant", content=self.content_preprocessor(message["content"]))
        required = self.require_stop_sequence_for_format
        ended = termination.is_stop_sequence if required else termination.is_clean
        return _Player(message, action.stop_reason == "stop" and ended)

    async def _judge(self, first: _Player, second: _Player) -> float:
        comparison = Comparison(self.convo_prefix, [first.message], [second.message])
        return await checked_score(self.preference_model, comparison)


def win_minus_losses(num_players: int, pairs: Sequence[tuple[int, int]], scores: Sequence[float]) -> list[float]:
    """For each player, wins minus losses over matchups. A score is what the second of a pair won from the first."""
    won_G, met_G = [0.0] * num_players, [0] * num_players
    for (first, second), score in zip(pairs, scores, strict=True):
        won_G[first] -= score
        won_G[second] += score
        met_G[first] += 1
        met_G[second] += 1
    return [won / met if met else 0.0 for won, met in zip(won_G, met_G, strict=True)]


# ---- datasets ----------------------------------------------------------------------------------------------------


class PairwisePreferenceDataset:
    """An RLDataset of the prompts of comparisons, whose own answers are not used: shuffled in every epoch,
    `groups_per_batch` at a time, as `datasets.Batches` has it. `make_builder` may be a `partial` of
    PairwisePreferenceGroupBuilder."""

    def __init__(
        self,
        comparisons: Sequence[LabeledComparison],
        groups_per_batch: int,
        make_builder: Callable[[Sequence[Message]], EnvGroupBuilder],
        *,
        seed: int = 0,
        num_epochs: int = 1,
    ) -> None:
        self._batches = Batches(comparisons, groups_per_batch, num_epochs=num_epochs, seed=seed)
        self._make_builder = make_builder

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`, counted over all epochs: one for each prompt."""
        return [self._make_builder(labeled.comparison.prompt_conversation) for labeled in self._batches[index]]

    def __len__(self) -> int:
        return len(self._batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairwisePreferenceDatasetBuilder:
    """An RLDatasetBuilder: prompts from comparisons, and a judge for what the policy says to them."""

    comparison_builder: ComparisonDatasetBuilder
    preference_model: PreferenceModel
    policy_renderer: Renderer
    groups_per_batch: int  # prompts
    group_size: int = 4  # answers to each
    tournament_pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS
    matchup_group_size: int = 4
    content_preprocessor: Callable[[Content], Content] | None = None
    require_stop_sequence_for_format: bool = True  # see PairwisePreferenceGroupBuilder
    num_epochs: int = 1
    seed: int = 0

    async def __call__(self) -> tuple[PairwisePreferenceDataset, PairwisePreferenceDataset | None]:
        train, test, _ = self.comparison_builder.get_labeled_comparisons()
        return (
            self._dataset(train, self.groups_per_batch, self.num_epochs),
            self._dataset(test, min(self.groups_per_batch, len(test)), num_epochs=1) if test else None,
        )

    def _dataset(
        self, comparisons: Sequence[LabeledComparison], groups_per_batch: int, num_epochs: int
    ) -> PairwisePreferenceDataset:
        return PairwisePreferenceDataset(
            comparisons, groups_per_batch, self._group_builder, seed=self.seed, num_epochs=num_epochs
        )

    def _group_builder(self, convo_prefix: Sequence[Message]) -> PairwisePreferenceGroupBuilder:
        return PairwisePreferenceGroupBuilder(
            convo_prefix,
            self.policy_renderer,
            self.preference_model,
            self.group_size,
            self.tournament_pattern,
            self.matchup_group_size,
            self.content_preprocessor,
            require_stop_sequence_for_format=self.require_stop_sequence_for_format,
        )
