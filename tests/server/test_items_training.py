"""The protocol's conformance list: what training means (items 14 to 22, 27 to 30, 57, 62)."""

from collections.abc import Sequence

import numpy as np
import pytest
import tinker
import torch
from running import MODELS, datum, logprobs, made, train
from tinker import types


def test_item_14_forward_leaves_gradients_as_they_are(sdk: tinker.ServiceClient) -> None:
    plain, measured = made(sdk), made(sdk)
    for client in (plain, measured):
        client.forward_backward([datum()], "cross_entropy")
        if client is measured:
            client.forward([datum([1, 2, 3])], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert logprobs(plain) == logprobs(measured)


def test_item_15_one_call_and_several_calls_add_up_to_the_same(sdk: tinker.ServiceClient) -> None:
    together, apart = made(sdk), made(sdk)
    data = [datum(), datum([1, 2, 3]), datum([9, 8, 7])]
    together.forward_backward(data, "cross_entropy")
    for each in data:
        apart.forward_backward([each], "cross_entropy")
    for client in (together, apart):
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    np.testing.assert_allclose(logprobs(together), logprobs(apart), rtol=1e-6)


def test_item_16_pipelined_and_awaited_steps_give_the_same_weights(sdk: tinker.ServiceClient) -> None:
    pipelined, awaited = made(sdk), made(sdk)
    for _ in range(3):
        train(pipelined)
        awaited.forward_backward([datum()], "cross_entropy").result()
        awaited.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert logprobs(pipelined) == logprobs(awaited)


def test_item_18_a_custom_loss_has_the_gradient_of_the_built_in_one(sdk: tinker.ServiceClient) -> None:
    built_in, custom = made(sdk), made(sdk)

    def loss_fn(data: list[types.Datum], logprobs_D: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = -sum((logprobs_N.sum() for logprobs_N in logprobs_D), torch.tensor(0.0))
        return loss, {"mine:sum": 3.0}

    built_in.forward_backward([datum()], "cross_entropy")
    metrics = custom.forward_backward_custom([datum()], loss_fn).result().metrics
    assert metrics["mine:sum"] == 3.0
    assert "surrogate_loss:sum" in metrics
    for client in (built_in, custom):
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    np.testing.assert_allclose(logprobs(built_in), logprobs(custom), rtol=1e-6)


def policy_datum(tokens: Sequence[int] = (5, 17, 42, 8)) -> types.Datum:
    num_targets = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": list(tokens[1:]),
            "logprobs": [-3.0, -4.5, -2.0][:num_targets],
            "advantages": [1.0, -0.5, 2.0][:num_targets],
        },
    )


def by_formula(loss_fn: str, p: np.ndarray, q: np.ndarray, advantage: np.ndarray, config: dict[str, float]) -> float:
    ratio = np.exp(p - q)
    match loss_fn:
        case "importance_sampling":
            return float(-(ratio * advantage).sum())
        case "ppo":
            low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
            return float(-np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage).sum())
        case "cispo":
            low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
            return float(-(np.clip(ratio, low, high) * p * advantage).sum())
        case _:
            return float(-(p * advantage - 0.5 * config["beta"] * (p - q) ** 2).sum())


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        ("importance_sampling", {}),
        ("ppo", {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
        ("cispo", {}),
        ("cispo", {"clip_high_threshold": 1.0}),
        ("dro", {"beta": 0.3}),
    ],
)
def test_item_19_each_loss_is_what_its_formula_says(
    sdk: tinker.ServiceClient, loss_fn: str, config: dict[str, float]
) -> None:
    output = made(sdk).forward_backward([policy_datum()], loss_fn, config or None).result()  # type: ignore[arg-type]
    p = np.array(output.loss_fn_outputs[0]["logprobs"].data)
    inputs = policy_datum().loss_fn_inputs
    expected = by_formula(loss_fn, p, np.array(inputs["logprobs"].data), np.array(inputs["advantages"].data), config)
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


def test_item_20_a_saved_state_goes_on_to_the_bit_and_without_the_optimizer_as_a_fresh_one(
    sdk: tinker.ServiceClient,
) -> None:
    client = made(sdk)
    train(client)
    path = client.save_state("twenty").result().path
    again = sdk.create_training_client_from_state_with_optimizer(path).result()
    fresh = sdk.create_training_client_from_state(path).result()
    assert again.get_info().lora_rank == 4
    for each in (client, again, fresh):
        train(each)
    assert logprobs(again) == logprobs(client)
    assert logprobs(fresh) != logprobs(client)


def test_item_21_a_sampler_of_saved_weights_agrees_with_its_trainer(sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    train(client)
    path = client.save_weights_for_sampler("one").result().path
    assert path == f"tinker://{client.model_id}/sampler_weights/one"
    sampler = sdk.create_sampling_client(model_path=path).result()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([5, 17, 42, 8, 99, 3, 61])).result()
    np.testing.assert_allclose(np.float32(scored[1:]), np.float32(logprobs(client)), rtol=1e-5)


def test_item_22_frozen_weights_stay_what_they_were(sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    prompt = types.ModelInput.from_ints([5, 17, 42])
    frozen = client.save_weights_and_get_sampling_client().result()
    before = frozen.compute_logprobs(prompt).result()
    train(client)
    assert frozen.compute_logprobs(prompt).result() == before
    newer = client.save_weights_and_get_sampling_client().result()
    assert newer.compute_logprobs(prompt).result() != before


def test_item_27_several_targets_a_position_dense_or_sparse(sdk: tinker.ServiceClient) -> None:
    targets = torch.tensor([[17, 3], [42, 4], [8, 5]])
    weights = torch.tensor([[0.7, 0.3], [1.0, 0.0], [0.0, 0.0]])
    outputs = []
    for sparse in (False, True):
        make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
        inputs = {"target_tokens": make(targets), "weights": make(weights)}
        each = types.Datum(model_input=types.ModelInput.from_ints([5, 17, 42]), loss_fn_inputs=inputs)
        outputs.append(made(sdk).forward_backward([each], "cross_entropy").result())
    for output in outputs:
        logprobs_NK = np.array(output.loss_fn_outputs[0]["logprobs"].data).reshape(3, 2)
        assert output.loss_fn_outputs[0]["logprobs"].shape == [3, 2]
        assert output.metrics["loss:sum"] == pytest.approx(-float((logprobs_NK * weights.numpy()).sum()), rel=1e-4)
    assert outputs[0].metrics == outputs[1].metrics


def test_item_28_a_new_adapter_changes_nothing(sdk: tinker.ServiceClient) -> None:
    prompt = types.ModelInput.from_ints([5, 17, 42])
    base = sdk.create_sampling_client(base_model=MODELS[0]).result().compute_logprobs(prompt).result()
    assert made(sdk).save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result() == base


def test_item_29_a_step_without_a_gradient_fails_and_harms_nothing(sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    before = logprobs(client)
    with pytest.raises(tinker.RequestFailedError, match="there is no gradient"):
        client.optim_step(types.AdamParams()).result()
    train(client)
    with pytest.raises(tinker.RequestFailedError, match="there is no gradient"):
        client.optim_step(types.AdamParams()).result()
    assert logprobs(client) != before


def test_item_29_the_parameters_of_a_step_are_honoured(sdk: tinker.ServiceClient) -> None:
    clipped, free, decayed = made(sdk), made(sdk), made(sdk)
    parameters = [
        types.AdamParams(learning_rate=0.1, eps=1.0, grad_clip_norm=1e-3),
        types.AdamParams(learning_rate=0.1, eps=1.0),
        types.AdamParams(learning_rate=0.1, eps=1.0, weight_decay=0.5),
    ]
    for client, params in zip((clipped, free, decayed), parameters, strict=True):
        for _ in range(2):
            client.forward_backward([datum()], "cross_entropy")
            client.optim_step(params).result()
    assert len({tuple(logprobs(client)) for client in (clipped, free, decayed)}) == 3


def test_item_30_clients_do_not_meet(sdk: tinker.ServiceClient) -> None:
    alone, beside, neighbour = made(sdk), made(sdk), made(sdk, seed=5)
    for _ in range(3):
        train(alone)
    for _ in range(3):
        train(beside)
        neighbour.forward_backward([datum([1, 2, 3])], "cross_entropy")
        neighbour.optim_step(types.AdamParams(learning_rate=0.9))
    assert logprobs(alone) == logprobs(beside)


def test_item_57_a_name_that_is_taken_is_refused_at_once_and_overwriting_replaces(sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    train(client)
    path = client.save_state("same").result().path
    with pytest.raises(tinker.RequestFailedError, match="choose another name, or overwrite it") as failure:
        client.save_state("same").result()
    assert str(failure.value.category) == "user"
    train(client)
    assert client.save_state("same", overwrite=True).result().path == path
    again = sdk.create_training_client_from_state(path).result()
    assert logprobs(again) == logprobs(client)


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".hidden", "x" * 200, "tinker://a/weights/b"])
def test_no_name_of_a_checkpoint_becomes_a_path(sdk: tinker.ServiceClient, name: str) -> None:
    client = made(sdk)
    with pytest.raises(tinker.RequestFailedError, match="the name of a checkpoint"):
        client.save_state(name).result()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_item_62_a_state_may_be_loaded_into_a_model_at_any_time(sdk: tinker.ServiceClient) -> None:
    client = made(sdk)
    train(client)
    path, before = client.save_state("sixty-two").result().path, logprobs(client)
    train(client)
    client.load_state_with_optimizer(path).result()
    assert logprobs(client) == before


def test_no_checkpoint_is_at_another_path(sdk: tinker.ServiceClient) -> None:
    for path in ("tinker://x/weights/..", "tinker://../weights/passwd"):
        with pytest.raises(tinker.NotFoundError, match="there is no checkpoint at this path"):
            sdk.create_training_client_from_state(path).result()
