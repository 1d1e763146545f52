"""Twenty things that a program does with the Tinker SDK, whatever its version since 0.25: what `sdk_versions.py` runs.

    python sdk_steps.py URL

Prints a line for each step, and exits with the number of those that failed. It needs no more than the SDK and torch.
"""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tinker
import torch
from tinker import types

MODEL = "tiny/model"
TOKENS = [5, 17, 42, 8, 99, 3, 61]
PROMPT = types.ModelInput.from_ints(TOKENS[:3])


def made(client: Any) -> Any:
    """Clients were returned as they are until 0.37, as futures since."""
    return client.result() if hasattr(client, "result") else client


def datum(tokens: Sequence[int] = TOKENS, weight: float = 1.0) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": [weight] * (len(tokens) - 1)},
    )


def policy_datum() -> types.Datum:
    inputs = {"target_tokens": TOKENS[1:4], "logprobs": [-3.0, -4.5, -2.0], "advantages": [1.0, -0.5, 2.0]}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:3]), loss_fn_inputs=inputs)


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        (a is None and b is None) or abs(a - b) < 1e-5 for a, b in zip(one, other, strict=True)
    )


def refused(call: Callable[[], object], by: type[Exception], reason: str) -> None:
    try:
        call()
    except by as error:
        said = str(error)
    else:
        raise AssertionError("it was not refused")
    assert reason in said, said


class Steps:
    def __init__(self, url: str) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-test", user_metadata={"who": "stéps"})
        self.rest = self.service.create_rest_client()

    def make(self, **more: Any) -> Any:
        return made(self.service.create_lora_training_client(MODEL, **{"rank": 4, "seed": 1, **more}))

    def train(self, client: Any) -> None:
        client.forward_backward([datum()], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.1))

    def logprobs(self, client: Any) -> list[float]:
        return client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()

    # ---- the steps -------------------------------------------------------------------------------------------------

    def capabilities(self) -> None:
        models = self.service.get_server_capabilities().supported_models
        assert MODEL in [model.model_name for model in models]

    def making_a_model(self) -> None:
        self.client = self.make()
        info = self.client.get_info()
        assert info.model_data.model_name == MODEL
        assert re.fullmatch(r"sess-\w+:train:\d+", str(info.model_id))

    def training_lowers_the_loss(self) -> None:
        losses = []
        for _ in range(4):
            output = self.client.forward_backward([datum()], "cross_entropy").result()
            self.client.optim_step(types.AdamParams(learning_rate=0.5)).result()
            losses.append(output.metrics["loss:sum"])
        assert losses == sorted(losses, reverse=True)

    def steps_that_are_not_waited_for(self) -> None:
        pipelined, awaited = self.make(), self.make()
        for _ in range(3):
            self.train(pipelined)
            awaited.forward_backward([datum()], "cross_entropy").result()
            awaited.optim_step(types.AdamParams(learning_rate=0.1)).result()
        assert same(self.logprobs(pipelined), self.logprobs(awaited))

    def a_call_of_many_datums(self) -> None:
        data = [datum([1 + index % 90, 2, 3 + index % 50]) for index in range(1100)]
        output = self.client.forward(data, "cross_entropy").result()
        assert len(output.loss_fn_outputs) == 1100

    def losses_of_policies(self) -> None:
        for loss in ("importance_sampling", "ppo"):
            assert self.client.forward_backward([policy_datum()], loss).result().metrics["loss:sum"]
        self.client.optim_step(types.AdamParams()).result()

    def a_custom_loss(self) -> None:
        built_in, custom = self.make(), self.make()

        def loss_fn(_: Any, logprobs_D: list[torch.Tensor]) -> Any:
            return -sum((each.sum() for each in logprobs_D), torch.tensor(0.0)), {"mine:sum": 1.0}

        built_in.forward_backward([datum()], "cross_entropy")
        assert custom.forward_backward_custom([datum()], loss_fn).result().metrics["mine:sum"] == 1.0
        for client in (built_in, custom):
            client.optim_step(types.AdamParams(learning_rate=0.1)).result()
        assert same(self.logprobs(built_in), self.logprobs(custom))

    def a_state_goes_on(self) -> None:
        path = self.client.save_state("kept").result().path
        again = made(self.service.create_training_client_from_state_with_optimizer(path))
        for client in (self.client, again):
            self.train(client)
        assert same(self.logprobs(again), self.logprobs(self.client))

    def a_state_without_the_optimizer(self) -> None:
        path = self.client.save_state("kept-too").result().path
        fresh = made(self.service.create_training_client_from_state(path))
        assert same(self.logprobs(fresh), self.logprobs(self.client))

    def a_saved_sampler(self) -> None:
        path = self.client.save_weights_for_sampler("one").result().path
        self.saved = path
        sampler = made(self.service.create_sampling_client(model_path=path))
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
        assert same(scored[1:], self.logprobs(self.client))

    def a_frozen_sampler(self) -> None:
        frozen = made(self.client.save_weights_and_get_sampling_client("named"))
        before = frozen.compute_logprobs(PROMPT).result()
        self.train(self.client)
        self.logprobs(self.client)
        assert frozen.compute_logprobs(PROMPT).result() == before

    def several_samples(self) -> None:
        sampler = made(self.service.create_sampling_client(base_model=MODEL))
        params = types.SamplingParams(max_tokens=8, seed=3)
        first, again = [sampler.sample(PROMPT, 4, params).result().sequences for _ in range(2)]
        assert [each.tokens for each in first] == [each.tokens for each in again]
        assert len({tuple(each.tokens) for each in first}) == 4
        assert all(len(each.logprobs) == len(each.tokens) for each in first)

    def stops(self) -> None:
        sampler = made(self.service.create_sampling_client(base_model=MODEL))
        full = self.drawn(sampler, [])
        for stop in (chr(full[2]), [chr(full[2])], [full[2]]):
            assert self.drawn(sampler, stop) == full[: full.index(full[2]) + 1]

    def drawn(self, sampler: Any, stop: Any) -> list[int]:
        params = types.SamplingParams(max_tokens=6, seed=3, stop=stop)
        return list(sampler.sample(PROMPT, 1, params).result().sequences[0].tokens)

    def logprobs_of_a_prompt(self) -> None:
        sampler = made(self.service.create_sampling_client(base_model=MODEL))
        params = types.SamplingParams(max_tokens=1, seed=1)
        answer = sampler.sample(PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
        assert [each is None for each in answer.prompt_logprobs] == [True, False, False]
        assert [row if row is None else len(row) for row in answer.topk_prompt_logprobs] == [None, 3, 3]

    def many_samples(self) -> None:
        sampler = made(self.service.create_sampling_client(base_model=MODEL))
        asked = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2, seed=1)) for _ in range(100)]
        assert len([each.result() for each in asked]) == 100

    def runs_and_checkpoints_are_listed(self) -> None:
        runs = self.rest.list_training_runs().result().training_runs
        run_id = str(self.client.get_info().model_id)
        assert run_id in [run.training_run_id for run in runs]
        listed = self.rest.list_checkpoints(run_id).result().checkpoints
        assert {"weights/kept", "sampler_weights/one"} <= {each.checkpoint_id for each in listed}

    def checkpoints_are_changed(self) -> None:
        self.rest.publish_checkpoint_from_tinker_path(self.saved).result()
        self.rest.unpublish_checkpoint_from_tinker_path(self.saved).result()
        self.rest.set_checkpoint_ttl_from_tinker_path(self.saved, 3600).result()
        self.rest.delete_checkpoint_from_tinker_path(self.saved).result()
        listed = self.rest.list_user_checkpoints().result().checkpoints
        assert self.saved not in [each.tinker_path for each in listed]

    def what_cannot_be_trained_on_fails_by_itself(self) -> None:
        bad = self.client.forward_backward([datum([5, 100_000, 7])], "cross_entropy")
        step = self.client.optim_step(types.AdamParams())
        for future in (bad, step):
            refused(future.result, tinker.TinkerError, "outside the vocabulary")
        self.train(self.client)
        assert self.logprobs(self.client)

    def what_is_not_there_is_refused(self) -> None:
        make = self.service.create_training_client_from_state
        refused(lambda: made(make("tinker://none/weights/none")), tinker.NotFoundError, "no checkpoint at this path")

    def closing(self) -> None:
        if hasattr(self.service, "close"):  # since 0.28
            self.service.close("success")


STEPS: list[Callable[[Steps], None]] = [
    Steps.capabilities,
    Steps.making_a_model,
    Steps.training_lowers_the_loss,
    Steps.steps_that_are_not_waited_for,
    Steps.a_call_of_many_datums,
    Steps.losses_of_policies,
    Steps.a_custom_loss,
    Steps.a_state_goes_on,
    Steps.a_state_without_the_optimizer,
    Steps.a_saved_sampler,
    Steps.a_frozen_sampler,
    Steps.several_samples,
    Steps.stops,
    Steps.logprobs_of_a_prompt,
    Steps.many_samples,
    Steps.runs_and_checkpoints_are_listed,
    Steps.checkpoints_are_changed,
    Steps.what_cannot_be_trained_on_fails_by_itself,
    Steps.what_is_not_there_is_refused,
    Steps.closing,
]


def main(url: str) -> int:
    warnings.simplefilter("ignore")  # of what later versions call otherwise
    steps, num_failed = Steps(url), 0
    for step in STEPS:
        try:
            step(steps)
            said = "passed"
        except Exception as error:  # each step says for itself whether it is done
            said, num_failed = f"FAILED: {type(error).__name__}: {error}", num_failed + 1
        sys.stdout.write(f"{tinker.__version__}  {step.__name__.replace('_', ' ')}: {said}\n")
        sys.stdout.flush()
    return num_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
