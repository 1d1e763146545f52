from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.backends import recording
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.supervised.nll import mean_nll
from stovetop.supervised.normalize import normalize_data
from stovetop.types import AdamParams, Datum, ModelInput

weights = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5)


def datum(*weights: float, text: bytes = b"abcdefgh") -> Datum:
    tokens = text[: len(weights) + 1]
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": list(tokens[1:]), "weights": list(weights)})


def sum_of_losses(data: list[Datum], nlls_D: list[list[float]]) -> float:
    return sum(
        weight * nll
        for of_one, nlls in zip(data, nlls_D, strict=True)
        for weight, nll in zip(of_one.loss_fn_inputs["weights"].tolist(), nlls, strict=True)
    )


@pytest.mark.parametrize(("normalize", "expected"), [("sum", 7.0), ("token", 0.875), ("example", 1.25)])
def test_the_loss_is_what_its_name_says(normalize: str, expected: float):
    scaled = normalize_data([datum(1, 1), datum(1, 1, 1, 1, 1, 1)], normalize)
    assert sum_of_losses(scaled, [[1, 3], [0.5] * 6]) == pytest.approx(expected)


@given(st.lists(weights, min_size=1, max_size=5))
def test_the_weights_of_a_mean_sum_to_one(weights_D: list[list[float]]):
    data = [datum(*weights_N) for weights_N in weights_D]
    for normalize in ("token", "example"):
        total = sum(sum(scaled.loss_fn_inputs["weights"].tolist()) for scaled in normalize_data(data, normalize))
        assert total == pytest.approx(1.0 if any(map(sum, weights_D)) else 0.0)


def test_an_example_with_nothing_to_train_has_no_part_in_the_mean_of_examples():
    scaled = normalize_data([datum(1, 1), datum(0, 0), datum(1)], "example")
    assert [of_one.loss_fn_inputs["weights"].tolist() for of_one in scaled] == [[0.25, 0.25], [0, 0], [0.5]]


def test_the_datums_of_one_episode_are_one_example():
    data = [datum(1, 1), datum(1, 1), datum(1)]
    scaled = normalize_data(data, "example", ["first", "first", "second"])
    assert [of_one.loss_fn_inputs["weights"].tolist() for of_one in scaled] == [[0.125] * 2, [0.125] * 2, [0.5]]


def test_of_rl_data_the_mask_says_what_is_active_also_where_the_advantage_is_zero():
    def acted(advantage: float) -> Datum:
        inputs = {"target_tokens": [98, 99], "advantages": [0.0, advantage], "mask": [0.0, 1.0]}
        return Datum(ModelInput.from_ints([97, 98]), inputs)

    scaled = normalize_data([acted(1.0), acted(0.0)], "token")
    assert [of_one.loss_fn_inputs["advantages"].tolist() for of_one in scaled] == [[0, 0.5], [0, 0]]
    assert scaled[0].loss_fn_inputs["mask"].tolist() == [0, 1]


def test_data_without_mask_and_weights_is_refused_with_its_index():
    bare = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "advantages": [1.0]})
    with pytest.raises(InvalidRequest, match=r"datum 1 .*advantages"):
        normalize_data([datum(1), bare], "token")


def test_an_unknown_normaliser_is_refused_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'token'"):
        normalize_data([datum(1)], "tokens")


@pytest.mark.parametrize("splits", [[2], [1, 1]])
def test_gradients_of_parts_add_up_to_that_of_the_whole_and_the_logged_loss_to_the_mean(
    tmp_path: Path, splits: list[int]
):
    data = [datum(1, 1), datum(1, 1, 1, 1, 1, 1, text=b"ghfedcba")]
    scaled = normalize_data(data, "token")
    with recording.open_service(tmp_path) as service:
        whole, parts = (service.create_lora_training_client("any/name").result() for _ in range(2))
        output = whole.forward(data, "cross_entropy").result()
        whole.forward_backward(scaled, "cross_entropy")
        reported = []
        for start, size in zip((0, splits[0]), splits, strict=False):
            reported.append(parts.forward_backward(scaled[start : start + size], "cross_entropy").result())
        for client in (whole, parts):
            client.optim_step(AdamParams(0.1)).result()
        after = [client.forward(data, "cross_entropy").result().metrics["loss:sum"] for client in (whole, parts)]
    assert sum(part.metrics["loss:sum"] for part in reported) == pytest.approx(mean_nll(output, data), rel=1e-6)
    assert after[0] == pytest.approx(after[1], rel=1e-6)
