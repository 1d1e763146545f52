"""What forward, forward_backward and optim_step promise, of every backend."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from examples import OTHER_TOKENS, TOKENS, datum, descent, logprobs, policy_datum, train
from providers import Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.losses import LOSSES
from stovetop.types import AdamParams, Datum, ImageChunk, ModelInput, TensorData

Program = Callable[[TrainingClient], object]


@pytest.fixture
def after(provider: Provider, backend: ServiceClient) -> Callable[[Program], tuple[float, np.ndarray]]:
    """Runs a program of forward_backwards on a fresh adapter; returns the length of the gradient and, for its
    direction, the logprobs after one step of gradient descent."""

    def run(program: Program) -> tuple[float, np.ndarray]:
        client = backend.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
        program(client)
        norm = client.optim_step(descent(0.02)).result().metrics["grad_norm"]
        return norm, logprobs(client)

    return run


def assert_same_gradient(one: tuple[float, np.ndarray], other: tuple[float, np.ndarray]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-4)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-4, atol=1e-5)


# ---- sums, never means -----------------------------------------------------------------------------------------------


def test_the_same_datum_twice_counts_twice(after: Callable[[Program], tuple[float, np.ndarray]]) -> None:
    once, _ = after(lambda client: client.forward_backward([datum()], "cross_entropy"))
    twice = after(lambda client: client.forward_backward([datum(), datum()], "cross_entropy"))
    assert twice[0] == pytest.approx(2 * once, rel=1e-4)
    assert_same_gradient(twice, after(lambda client: client.forward_backward([datum(weight=2.0)], "cross_entropy")))


def test_two_calls_add_up(after: Callable[[Program], tuple[float, np.ndarray]]) -> None:
    def one_by_one(client: TrainingClient) -> None:
        client.forward_backward([datum()], "cross_entropy")
        client.forward_backward([datum(OTHER_TOKENS)], "cross_entropy")

    together = after(lambda client: client.forward_backward([datum(), datum(OTHER_TOKENS)], "cross_entropy"))
    assert_same_gradient(together, after(one_by_one))


def test_the_loss_is_the_sum_over_datums_and_their_tokens(trainer: TrainingClient) -> None:
    def loss(data: Sequence[Datum]) -> float:
        return trainer.forward(data, "cross_entropy").result().metrics["loss:sum"]

    a, b = loss([datum()]), loss([datum(OTHER_TOKENS)])
    assert loss([datum(), datum()]) == pytest.approx(2 * a, rel=1e-5)
    assert loss([datum(), datum(OTHER_TOKENS)]) == pytest.approx(a + b, rel=1e-5)
    assert loss([datum(weight=2.0)]) == pytest.approx(2 * a, rel=1e-5)
    assert loss([datum(weight=-1.0)]) == pytest.approx(-a, rel=1e-5)
    assert loss([datum(weight=0.0)]) == 0.0


@pytest.mark.parametrize("size", [2, 4, 8])
def test_any_cut_into_micro_batches_gives_the_same_gradient(
    after: Callable[[Program], tuple[float, np.ndarray]], size: int
) -> None:
    data = [policy_datum(TOKENS[: length + 2], advantage=(-1) ** length) for length in range(1, 9)]

    def in_parts(client: TrainingClient, part: int) -> None:
        for start in range(0, len(data), part):
            client.forward_backward(data[start : start + part], "importance_sampling")

    assert_same_gradient(after(lambda client: in_parts(client, 1)), after(lambda client: in_parts(client, size)))


# ---- losses ----------------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    loss: float
    slope: np.ndarray  # of the loss in each logprob


def clipped(ratio: np.ndarray, advantages: np.ndarray) -> Expected:
    plain, within = ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages
    return Expected(-np.minimum(plain, within).sum(), np.where(plain <= within, -plain, 0.0))


def expected(loss_fn: str, p: np.ndarray, example: Datum) -> Expected:
    """The formulas of the loss table at their defaults, written down once more."""
    inputs = {name: tensor.to_numpy().astype(np.float64) for name, tensor in example.loss_fn_inputs.items()}
    if loss_fn == "cross_entropy":
        return Expected(-(p * inputs["weights"]).sum(), -inputs["weights"])
    q, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = np.exp(p - q)
    coefficient = np.clip(ratio, 0.0, 4.0) * advantages
    return {
        "importance_sampling": Expected(-(ratio * advantages).sum(), -ratio * advantages),
        "ppo": clipped(ratio, advantages),
        "cispo": Expected(-(coefficient * p).sum(), -coefficient),
        "dro": Expected(-(p * advantages - 0.025 * (p - q) ** 2).sum(), -(advantages - 0.05 * (p - q))),
        "gspo": clipped(np.full_like(p, np.exp((p - q).mean())), advantages),
    }[loss_fn]


def example_for(loss_fn: str) -> Datum:
    if loss_fn == "cross_entropy":
        return datum()
    mask = TensorData([1.0] * (len(TOKENS) - 1), "float32")
    return policy_datum(**({"sequence_ratio_mask": mask} if loss_fn == "gspo" else {}))


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_the_loss_is_what_its_formula_gives_for_the_returned_logprobs(trainer: TrainingClient, loss_fn: str) -> None:
    example = example_for(loss_fn)
    output = trainer.forward_backward([example], loss_fn).result()
    p = output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    assert p.shape == (len(TOKENS) - 1,)
    assert output.metrics["loss:sum"] == pytest.approx(expected(loss_fn, p, example).loss, rel=1e-4)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_the_gradient_of_a_loss_is_that_of_cross_entropy_weighted_by_its_slope(
    after: Callable[[Program], tuple[float, np.ndarray]], trainer: TrainingClient, loss_fn: str
) -> None:
    """Cross-entropy is linear in the logprobs: with weights of -slope it has the gradient of any other loss."""
    example = example_for(loss_fn)
    slope = expected(loss_fn, logprobs(trainer, [datum()]).astype(np.float64), example).slope
    linear = Datum(example.model_input, {"target_tokens": TOKENS[1:], "weights": -slope})
    built_in = after(lambda client: client.forward_backward([example], loss_fn))
    assert_same_gradient(built_in, after(lambda client: client.forward_backward([linear], "cross_entropy")))


def test_a_config_reaches_the_loss(trainer: TrainingClient) -> None:
    def loss(config: dict[str, float]) -> float:
        return trainer.forward([policy_datum()], "ppo", config).result().metrics["loss:sum"]

    assert loss({}) == loss({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    assert loss({}) != loss({"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})


def test_soft_targets_weigh_several_tokens_a_position(trainer: TrainingClient) -> None:
    targets = np.array([[token, token + 1] for token in TOKENS[1:]])
    weights = np.tile(np.array([0.75, 0.25], np.float32), (len(targets), 1))
    soft = Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": targets, "weights": weights})
    output = trainer.forward([soft], "cross_entropy").result()
    scored = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert scored.shape == targets.shape
    np.testing.assert_allclose(scored[:, 0], logprobs(trainer, [datum()]), atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-float((scored * weights).sum()), rel=1e-5)


def test_a_custom_loss_has_the_gradient_of_the_built_in_one(
    after: Callable[[Program], tuple[float, np.ndarray]],
) -> None:
    data = [datum(weight=0.5), datum(OTHER_TOKENS)]

    def loss_fn(data: Sequence[Datum], scored: list) -> tuple:
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        loss = -sum((p * w).sum() for p, w in zip(scored, weights, strict=True))
        return loss, {"mine": 7.0}

    built_in = after(lambda client: client.forward_backward(data, "cross_entropy"))
    assert_same_gradient(built_in, after(lambda client: client.forward_backward_custom(data, loss_fn)))


def test_a_custom_loss_returns_its_metrics_and_its_loss(trainer: TrainingClient) -> None:
    """The example of the SDK's documentation."""

    def loss_fn(data: Sequence[Datum], scored: list) -> tuple:
        loss = (scored[0] ** 2).sum()
        return loss, {"custom_metric": loss.item()}

    output = trainer.forward_backward_custom([datum()], loss_fn).result()
    expected = float((logprobs(trainer, [datum()]) ** 2).sum())
    assert output.metrics == {"custom_metric": pytest.approx(expected, 1e-5), "loss:sum": pytest.approx(expected, 1e-5)}
    np.testing.assert_array_equal(output.loss_fn_outputs[0]["logprobs"].to_numpy(), logprobs(trainer, [datum()]))


def test_a_custom_loss_that_ignores_the_model_fails_and_says_so(trainer: TrainingClient) -> None:
    future = trainer.forward_backward_custom([datum()], lambda data, scored: (scored[0].detach().sum(), {}))
    with pytest.raises(RequestFailedError, match=r"forward_backward_custom \(call 1 of .*depends on the logprobs"):
        future.result()


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def test_forward_leaves_no_gradient_and_no_trace(trainer: TrainingClient) -> None:
    before = logprobs(trainer)
    trainer.forward([datum()], "cross_entropy").result()
    with pytest.raises(RequestFailedError, match="no gradient; call forward_backward"):
        trainer.optim_step(AdamParams()).result()
    np.testing.assert_array_equal(logprobs(trainer), before)


def test_weights_change_at_optim_step_alone(trainer: TrainingClient) -> None:
    before = logprobs(trainer)
    trainer.forward_backward([datum()], "cross_entropy").result()
    np.testing.assert_array_equal(logprobs(trainer), before)
    trainer.optim_step(AdamParams(learning_rate=0.01)).result()
    assert (logprobs(trainer) != before).any()


def test_a_learning_rate_of_zero_changes_no_bit(trainer: TrainingClient) -> None:
    before = logprobs(trainer)
    trainer.forward_backward([datum()], "cross_entropy")
    metrics = trainer.optim_step(AdamParams(learning_rate=0.0, weight_decay=0.1)).result().metrics
    assert metrics["update_norm"] == 0.0
    assert metrics["grad_norm"] > 0.0
    np.testing.assert_array_equal(logprobs(trainer), before)


def test_gradients_are_consumed_by_a_step(trainer: TrainingClient) -> None:
    train(trainer, 1, 0.01)
    with pytest.raises(RequestFailedError, match="no gradient"):
        trainer.optim_step(AdamParams()).result()


def test_clipping_bounds_the_step_and_reports_the_norm_before(trainer: TrainingClient) -> None:
    trainer.forward_backward([datum()], "cross_entropy")
    metrics = trainer.optim_step(descent(0.01, clip=0.5)).result().metrics
    assert metrics["grad_norm"] > 0.5
    assert metrics["update_norm"] == pytest.approx(0.01 * 0.5, rel=1e-3)


def test_weight_decay_is_decoupled_from_the_gradient(provider: Provider, backend: ServiceClient) -> None:
    """With a gradient of zero and no memory of others, a step shrinks the weights by lr x decay."""

    def update_norm(decay: float) -> float:
        client = backend.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
        client.forward_backward([datum()], "cross_entropy")
        client.optim_step(descent(0.1)).result()
        client.forward_backward([datum(weight=0.0)], "cross_entropy")
        params = AdamParams(learning_rate=0.01, beta1=0.0, beta2=0.0, weight_decay=decay)
        return client.optim_step(params).result().metrics["update_norm"]

    assert update_norm(0.0) == 0.0
    assert update_norm(0.2) == pytest.approx(2 * update_norm(0.1), rel=1e-3)
    assert update_norm(0.1) > 0.0


def test_training_teaches(provider: Provider, trainer: TrainingClient) -> None:
    before = logprobs(trainer, [datum()]).sum()
    train(trainer, 40, provider.learning_rate)
    assert logprobs(trainer, [datum()]).sum() > 0.5 * before


# ---- failure ---------------------------------------------------------------------------------------------------------


def _explode(data: Sequence[Datum], scored: list) -> tuple:
    raise ZeroDivisionError("a bug in the user's loss")


def _steps_around(trainer: TrainingClient, between: Program) -> np.ndarray:
    train(trainer, 2, 0.01)
    between(trainer)
    train(trainer, 2, 0.01, OTHER_TOKENS)
    return logprobs(trainer)


def test_a_gradient_that_is_not_finite_is_skipped_and_leaves_no_trace(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    def overflow(client: TrainingClient) -> None:
        impossible = policy_datum(logprob=-1e4)  # the ratio of probabilities is infinite
        client.forward_backward([impossible], "importance_sampling")
        metrics = client.optim_step(AdamParams(learning_rate=0.01)).result().metrics
        assert metrics["skipped_nonfinite"] == 1.0
        assert metrics["update_norm"] == 0.0

    twin = backend.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
    np.testing.assert_array_equal(_steps_around(trainer, overflow), _steps_around(twin, lambda client: None))


def test_a_clean_step_reports_that_nothing_was_skipped(trainer: TrainingClient) -> None:
    trainer.forward_backward([datum()], "cross_entropy")
    assert trainer.optim_step(AdamParams()).result().metrics["skipped_nonfinite"] == 0.0


def test_after_a_failed_forward_backward_the_step_fails_with_its_error_and_leaves_no_trace(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    def fail(client: TrainingClient) -> None:
        good = client.forward_backward([datum()], "cross_entropy")
        bad = client.forward_backward_custom([datum()], _explode)
        step = client.optim_step(AdamParams(learning_rate=0.01))
        good.result()
        with pytest.raises(
            RequestFailedError, match=r"forward_backward_custom \(call \d+ of .*a bug in the user's loss"
        ):
            bad.result()
        with pytest.raises(RequestFailedError, match=r"optim_step \(call \d+ of .*a bug in the user's loss"):
            step.result()

    twin = backend.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
    np.testing.assert_array_equal(_steps_around(trainer, fail), _steps_around(twin, lambda client: None))


def test_a_step_that_was_spoilt_fails_with_the_reason_and_leaves_no_trace(trainer: TrainingClient) -> None:
    before = logprobs(trainer)
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.spoil("chunk 2 was not there").result()
    with pytest.raises(RequestFailedError, match=r"its gradients are dropped.*chunk 2 was not there") as failure:
        trainer.optim_step(AdamParams()).result()
    assert failure.value.category == "user"
    assert np.array_equal(logprobs(trainer), before)
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.optim_step(AdamParams()).result()


def test_a_failed_call_keeps_its_cause(trainer: TrainingClient) -> None:
    with pytest.raises(RequestFailedError) as caught:
        trainer.forward_backward_custom([datum()], _explode).result()
    assert caught.value.__cause__ is not None
    assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)


# ---- refusals --------------------------------------------------------------------------------------------------------

BAD_DATA: dict[str, tuple[Datum, str, str]] = {
    "length": (
        Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]}),
        "cross_entropy",
        r"datum 1: target_tokens has shape \(2,\); model_input has 3 tokens",
    ),
    "vocabulary": (
        Datum(ModelInput.from_ints([1, 10**6]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]}),
        "cross_entropy",
        r"datum 1: model_input: token id 1000000 at position 1 is outside the vocabulary of .*0\.\.",
    ),
    "finite": (datum(weight=float("nan")), "cross_entropy", "datum 1: weights is nan at position 0"),
    "inputs": (datum(), "ppo", "datum 0 lacks logprobs, advantages; ppo needs"),
    "image": (
        Datum(ModelInput([ImageChunk(b"", "png", 1)]), {"target_tokens": [2], "weights": [1.0]}),
        "cross_entropy",
        "datum 1: model_input has an image",
    ),
}


@pytest.mark.parametrize("verb", ["forward", "forward_backward"])
@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_refused_by_the_call_itself(trainer: TrainingClient, verb: str, name: str) -> None:
    bad, loss_fn, words = BAD_DATA[name]
    call = {"forward": trainer.forward, "forward_backward": trainer.forward_backward}[verb]
    with pytest.raises(InvalidRequest, match=words):
        call([datum(), bad], loss_fn)
    with pytest.raises(RequestFailedError, match="no gradient"):
        trainer.optim_step(AdamParams()).result()


def test_empty_data_and_unknown_names_are_refused_by_the_call_itself(trainer: TrainingClient) -> None:
    with pytest.raises(InvalidRequest, match=r"data must be a list of at least 1 item.*empty"):
        trainer.forward_backward([], "cross_entropy")
    with pytest.raises(InvalidRequest, match=r"data must be a list of at least 1 item.*empty"):
        trainer.forward_backward_custom([], _explode)
    with pytest.raises(InvalidRequest, match="did you mean 'cross_entropy'"):
        trainer.forward_backward([datum()], "crossentropy")
    with pytest.raises(InvalidRequest, match="did you mean 'clip_low_threshold'"):
        trainer.forward_backward([policy_datum()], "ppo", {"clip_low": 0.9})


def test_a_datum_longer_than_the_context_is_refused_with_both_numbers(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    (limit,) = {
        model.max_context_length
        for model in backend.get_server_capabilities().supported_models
        if model.model_name == provider.base_model
    }
    assert limit is not None
    with pytest.raises(InvalidRequest, match=f"{limit + 1} tokens.*{limit}"):
        trainer.forward([datum([1] * (limit + 2))], "cross_entropy")


# ---- many clients, old names -----------------------------------------------------------------------------------------


def test_adapters_of_any_rank_live_side_by_side_and_do_not_meet(provider: Provider, backend: ServiceClient) -> None:
    def client(rank: int) -> TrainingClient:
        return backend.create_lora_training_client(provider.base_model, rank=rank, seed=rank).result()

    alone = client(3)
    train(alone, 3, 0.01)
    one, other = client(3), client(8)
    for _ in range(3):
        train(one, 1, 0.01)
        train(other, 1, 0.05, OTHER_TOKENS)
    np.testing.assert_array_equal(logprobs(one), logprobs(alone))
    assert (logprobs(other) != logprobs(alone)).any()
    assert (one.get_info().lora_rank, other.get_info().lora_rank) == (3, 8)


def test_a_hundred_clients_come_and_go(provider: Provider, backend: ServiceClient) -> None:
    for seed in range(100):
        client = backend.create_lora_training_client(provider.base_model, rank=1, seed=seed)
        assert client.result().get_info().lora_rank == 1


def test_the_names_of_older_sdks_enqueue_and_return_what_they_used_to(
    provider: Provider, backend: ServiceClient
) -> None:
    async def run() -> float:
        client = await backend.create_lora_training_client_async(provider.base_model, rank=4, seed=1)
        forward_backward = await client.forward_backward_async([datum()], loss_fn="cross_entropy")
        optim_step = await client.optim_step_async(AdamParams(learning_rate=0.01))
        await optim_step.result_async()
        return (await forward_backward.result_async()).metrics["loss:sum"]

    assert asyncio.run(run()) > 0


def test_a_client_tells_what_it_trains(provider: Provider, trainer: TrainingClient) -> None:
    info = trainer.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == (provider.base_model, 4, True)
    assert info.model_data.model_name == provider.base_model
    assert len(trainer.get_tokenizer().encode("hello")) > 0


def test_an_unknown_base_model_is_refused_by_the_call_itself(backend: ServiceClient) -> None:
    with pytest.raises(InvalidRequest, match="unknown base_model 'no/such-model'"):
        backend.create_lora_training_client("no/such-model")
    with pytest.raises(InvalidRequest, match="unknown base_model 'no/such-model'"):
        backend.create_sampling_client(base_model="no/such-model")
    with pytest.raises(InvalidRequest, match="rank must be an integer from 1 to 65536: 0"):
        backend.create_lora_training_client("no/such-model", rank=0)
