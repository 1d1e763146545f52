"""The table of losses: names and configs, and what is checked of a datum before anything runs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.input_checks import ModelLimits, check_data, check_model_input, check_shapes
from stovetop.losses import CISPO, DRO, GSPO, LOSSES, PPO, CrossEntropy, ImportanceSampling, parse_loss, temperature_of
from stovetop.types import Datum, ImageChunk, ModelInput, TensorData

LIMITS = ModelLimits("tiny", vocab_size=100, context_length=8)


def datum(**inputs: object) -> Datum:
    """Three tokens, with what cross-entropy needs unless said otherwise."""
    return Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0], **inputs})


def rl_datum(**inputs: object) -> Datum:
    given = {"target_tokens": [2, 3, 4], "logprobs": [0.0, -1.0, -1.0], "advantages": [0.0, 1.0, 1.0]}
    return Datum(ModelInput.from_ints([1, 2, 3]), {**given, **inputs})


def test_every_name_of_the_table_parses_to_its_own_loss_with_the_documented_defaults() -> None:
    assert {name: parse_loss(name) for name in LOSSES} == {
        "cross_entropy": CrossEntropy(),
        "importance_sampling": ImportanceSampling(temperature=1.0),
        "ppo": PPO(clip_low_threshold=0.8, clip_high_threshold=1.2),
        "cispo": CISPO(clip_low_threshold=0.0, clip_high_threshold=4.0),
        "dro": DRO(beta=0.05),
        "gspo": GSPO(clip_low_threshold=0.8, clip_high_threshold=1.2),
    }


def test_a_config_changes_only_the_fields_it_names() -> None:
    assert parse_loss("ppo", {"clip_high_threshold": 1.3}) == replace(PPO(), clip_high_threshold=1.3)
    assert temperature_of(parse_loss("ppo", {"temperature": 0.6})) == 0.6
    assert temperature_of(CrossEntropy()) == 1.0


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("cross_entrpy", {}, "did you mean 'cross_entropy'"),
        ("custom", {}, "known: cispo, cross_entropy, dro"),
        ("ppo", {"clip_hi_threshold": 1.3}, "loss_fn_config key of ppo.*did you mean 'clip_high_threshold'"),
        ("cross_entropy", {"temperature": 0.7}, "loss_fn_config key of cross_entropy"),
    ],
)
def test_a_misspelt_loss_or_key_is_refused_with_the_nearest_name(
    name: str, config: dict[str, float], words: str
) -> None:
    with pytest.raises(UnknownName, match=words):
        parse_loss(name, config)


def test_stable_reinforce_is_refused_because_nobody_published_it() -> None:
    with pytest.raises(InvalidRequest, match="no public definition"):
        parse_loss("stable_reinforce")


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("ppo", {"clip_low_threshold": 1.3}, "1.3, 1.2"),
        ("ppo", {"clip_low_threshold": -0.1}, "-0.1"),
        ("dro", {"beta": -1}, "-1"),
        ("dro", {"beta": float("nan")}, "beta.*nan"),
        ("dro", {"beta": "big"}, "beta.*'big'"),
        ("importance_sampling", {"temperature": 0}, "temperature.*0"),
    ],
)
def test_a_config_value_that_makes_no_sense_is_refused(name: str, config: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_loss(name, config)


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (datum(weights=[1.0, 1.0]), r"datum 1: weights has shape \(2,\), target_tokens \(3,\)"),
        (datum(target_tokens=[2, 3]), r"datum 1: target_tokens has shape \(2,\); model_input has 3"),
        (datum(target_tokens=[2, 3, 100]), r"datum 1: target_tokens: token id 100 at position 2.*0\.\.99"),
        (datum(target_tokens=[2, -1, 4]), "datum 1: target_tokens: token id -1 at position 1"),
        (datum(target_tokens=TensorData([2, 3, 4], "float32")), "datum 1: target_tokens must be int64: float32"),
        (datum(weights=TensorData([0, 1, 1], "int64")), "datum 1: weights must be float32; convert it first: int64"),
        (datum(weights=[0.0, float("nan"), 1.0]), "datum 1: weights is nan at position 1"),
        (datum(weights=[0.0, 1.0, float("inf")]), "datum 1: weights is inf at position 2"),
        (datum(mask=[0.0, 1.0, 1.0]), "datum 1 has mask, which cross_entropy does not read"),
        (Datum(ModelInput.from_ints([1]), {"target_tokens": [2]}), "datum 1 lacks weights"),
        (Datum(ModelInput.from_ints([1]), {"weights": [1.0]}), "datum 1 lacks target_tokens"),
        (Datum(ModelInput.empty(), {"target_tokens": [], "weights": []}), "datum 1: model_input is empty"),
        (Datum(ModelInput.from_ints([1] * 9), {"target_tokens": [1] * 9, "weights": [1.0] * 9}), "9 tokens.*tiny is 8"),
        (Datum(ModelInput.from_ints([1, 200, 3]), datum().loss_fn_inputs), "datum 1: model_input: token id 200"),
        (Datum(ModelInput([ImageChunk(b"", "png", 3)]), datum().loss_fn_inputs), "datum 1: .* image.*text only"),
    ],
)
def test_a_bad_datum_is_refused_by_index_field_value_and_limit(bad: Datum, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_data([datum(), bad], CrossEntropy(), LIMITS)


def test_empty_data_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"data must be a list of at least 1 item.*empty"):
        check_data([], CrossEntropy(), LIMITS)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_a_policy_loss_without_the_samplers_logprobs_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"lacks .*logprobs.*{name} needs"):
        check_data([datum()], parse_loss(name), LIMITS)


def test_only_cross_entropy_takes_several_targets_a_position() -> None:
    several = {"target_tokens": TensorData([[2, 5], [3, 6], [4, 7]], "int64")}
    weights = TensorData([[0.5, 0.5]] * 3, "float32")
    check_data([datum(**several, weights=weights)], CrossEntropy(), LIMITS)
    with pytest.raises(InvalidRequest, match=r"one target per position.*\(3, 2\)"):
        check_data([rl_datum(**several, logprobs=weights, advantages=weights)], PPO(), LIMITS)


def test_a_sequence_ratio_mask_holds_zeros_and_ones() -> None:
    check_data([rl_datum(sequence_ratio_mask=[0.0, 1.0, 1.0])], GSPO(), LIMITS)
    with pytest.raises(InvalidRequest, match="0 and 1 only"):
        check_data([rl_datum(sequence_ratio_mask=[0.0, 0.5, 1.0])], GSPO(), LIMITS)


def test_zero_and_negative_weights_are_legal() -> None:
    check_data([datum(weights=[0.0, 0.0, 0.0]), datum(weights=[-1.0, 0.0, 2.0])], CrossEntropy(), LIMITS)


def test_a_custom_loss_may_find_tensors_of_its_own() -> None:
    check_shapes([datum(anything=[1.0])], LIMITS)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8))
def test_every_input_within_the_limits_passes(tokens: list[int]) -> None:
    check_model_input(ModelInput.from_ints(tokens), LIMITS, what="prompt")
    inputs = {"target_tokens": tokens, "weights": [1.0] * len(tokens)}
    check_data([Datum(ModelInput.from_ints(tokens), inputs)], CrossEntropy(), LIMITS)
