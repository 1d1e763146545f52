"""Training against an oracle: the library's model in float64 with the adapter merged into its weights."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine import tiny
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.kernels.packing import Pack
from stovetop.engine.model import head as logprobs
from stovetop.engine.model.adopting import adopt
from stovetop.engine.training.adapter import Adapter
from stovetop.engine.training.loss_math import loss_sum
from stovetop.errors import CheckpointError, InvalidRequest
from stovetop.losses import CISPO, DRO, GSPO, PPO, CrossEntropy, ImportanceSampling, Loss, temperature_of
from stovetop.types import Datum, ModelInput

PROMPT = list(range(100, 115))
SEQUENCES = [tiny.tokens(9, 1), tiny.tokens(7, 2, PROMPT), tiny.tokens(12, 3, PROMPT), tiny.tokens(3, 4)]


def oracle(adapter: Adapter, data: list[Datum], loss: Loss) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by autograd in float64, one sequence at a time, full logits, W + (alpha/rank)·B·A."""
    model = tiny.llama().double().eval()
    leaves = {name: t.double().requires_grad_() for name, t in adapter.weights.tensors.items()}
    merged = {}
    for target in {name.rpartition(".")[0] for name in leaves}:
        base = model.get_parameter(f"{target}.weight").detach()
        merged[f"{target}.weight"] = base + adapter.weights.scale * leaves[f"{target}.B"] @ leaves[f"{target}.A"]
    total = torch.zeros((), dtype=torch.float64)
    for datum in data:
        tokens_1T = torch.tensor([datum.model_input.to_ints()])
        logits_TV = torch.func.functional_call(model, merged, (tokens_1T,), {"use_cache": False}).logits[0]
        logprobs_TV = (logits_TV / temperature_of(loss)).log_softmax(-1)
        target = datum.loss_fn_inputs["target_tokens"].to_torch()
        logprobs = logprobs_TV.gather(1, target.view(len(target), -1)).view(target.shape)
        given = {name: t.to_torch().double() for name, t in datum.loss_fn_inputs.items() if name != "target_tokens"}
        total = total + loss_sum(loss, logprobs, given)
    return total.item(), dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def assert_same(ours: dict[str, Tensor] | None, expected: dict[str, Tensor], tolerance: float = 2e-4) -> None:
    """Equal up to `tolerance` of the norm of each tensor."""
    assert ours is not None
    for name, tensor in expected.items():
        assert (ours[name].double() - tensor).norm() <= tolerance * (tensor.norm() + 1e-6), name


def soft_datum(sequence: list[int]) -> Datum:
    generator = torch.Generator().manual_seed(5)
    shape = (len(sequence) - 1, 3)
    return Datum(
        ModelInput.from_ints(sequence[:-1]),
        {
            "target_tokens": torch.randint(0, 512, shape, generator=generator),
            "weights": torch.randn(*shape, generator=generator),
        },
    )


def masked(datum: Datum) -> Datum:
    length = datum.model_input.length
    mask = [float(position >= 2) for position in range(length)]
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "sequence_ratio_mask": mask})


CROSS_ENTROPY_DATA = [*(tiny.datum(s, weight=0.5) for s in SEQUENCES), soft_datum(SEQUENCES[1])]
RL_DATA = [tiny.rl_datum(sequence, seed) for seed, sequence in enumerate(SEQUENCES)]


@pytest.mark.parametrize(
    ("loss", "data"),
    [
        (CrossEntropy(), CROSS_ENTROPY_DATA),
        (ImportanceSampling(), RL_DATA),
        (ImportanceSampling(temperature=0.7), RL_DATA),
        (PPO(), RL_DATA),
        (CISPO(), RL_DATA),
        (DRO(), RL_DATA),
        (GSPO(), [masked(datum) for datum in RL_DATA]),
    ],
    ids=lambda value: value.name if not isinstance(value, list) else "",
)
def test_loss_and_gradient_are_those_of_the_oracle(loss: Loss, data: list[Datum]) -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    expected_loss, expected = oracle(adapter, data, loss)
    output = tiny.run(engine, ops.ForwardBackward(adapter, data, loss))
    assert output.metrics["loss:sum"] == pytest.approx(expected_loss, rel=1e-4)
    assert_same(adapter.gradients, expected)


@pytest.mark.parametrize("max_tokens_per_pass", [1, 12, 30, 1000])
def test_any_cut_into_passes_gives_the_same_sums(max_tokens_per_pass: int) -> None:
    whole, cut = tiny.engine(), tiny.engine(max_tokens_per_pass=max_tokens_per_pass)
    adapters = [tiny.trained_adapter(whole), tiny.trained_adapter(cut)]
    outputs = [
        tiny.run(engine, ops.ForwardBackward(adapter, RL_DATA, ImportanceSampling()))
        for engine, adapter in zip((whole, cut), adapters, strict=True)
    ]
    assert outputs[1].metrics["loss:sum"] == pytest.approx(outputs[0].metrics["loss:sum"], rel=1e-5)
    assert adapters[0].gradients is not None
    assert_same(adapters[1].gradients, adapters[0].gradients, tolerance=1e-5)


@pytest.mark.parametrize(
    "windows",
    [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1], [2, 3, 4], [5], [6, 7]], [[i] for i in range(8)]],
    ids=["one call", "four calls", "eight calls"],
)
def test_the_gradient_of_a_batch_is_the_same_however_it_is_split_over_calls(windows: list[list[int]]) -> None:
    sequences = [tiny.tokens(length, length, [7, 8]) for length in range(1, 9)]
    data = [
        Datum(
            ModelInput.from_ints(s[:-1]),
            {"target_tokens": s[1:], "logprobs": [-6.0] * (len(s) - 1), "advantages": [(-1.0) ** i] * (len(s) - 1)},
        )
        for i, s in enumerate(sequences)
    ]
    engine = tiny.engine()
    adapter, reference = tiny.trained_adapter(engine), tiny.trained_adapter(engine)
    tiny.run(engine, ops.ForwardBackward(reference, data, CISPO()))
    for window in windows:
        tiny.run(engine, ops.ForwardBackward(adapter, [data[i] for i in window], CISPO()))
    assert reference.gradients is not None
    assert_same(adapter.gradients, reference.gradients, tolerance=1e-5)


def test_a_custom_loss_has_the_gradient_of_the_built_in_one() -> None:
    engine = tiny.engine()
    built_in, custom = tiny.trained_adapter(engine), tiny.trained_adapter(engine)
    data = [tiny.datum(s, weight=0.5) for s in SEQUENCES]

    def loss_fn(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        loss = -sum((p * w).sum() for p, w in zip(logprobs, weights, strict=True))
        return loss, {"longest": float(max(map(len, logprobs)))}

    tiny.run(engine, ops.ForwardBackward(built_in, data, CrossEntropy()))
    output = tiny.run_custom(engine, custom, data, loss_fn)
    assert built_in.gradients is not None
    assert_same(custom.gradients, built_in.gradients, tolerance=1e-6)
    assert output.metrics["longest"] == 26.0
    assert output.metrics["loss:sum"] == pytest.approx(
        -0.5 * sum(out["logprobs"].array.sum() for out in output.loss_fn_outputs), rel=1e-5
    )


def quadratic(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Over all data at once: none can be computed without the others."""
    return torch.cat(logprobs).mean().square() + sum(p.square().sum() for p in logprobs), {"datums": float(len(data))}


class Kept:
    """Counts the bytes that graphs keep alive, and the most at one time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> list[Tensor]:
        box = _Box([tensor])
        size = tensor.nbytes
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(box, self._freed, size)
        return box

    def _freed(self, size: int) -> None:
        self.now -= size


class _Box(list[Tensor]):
    """Can be referred to weakly."""


def test_a_custom_loss_keeps_to_the_bound_on_a_pass() -> None:
    """Four times the data keep no more than one pass does, and not more than with a built-in loss."""
    engine = tiny.engine(max_tokens_per_pass=64)
    most = {}
    for what, count in (("built-in", 24), ("custom", 6), ("custom", 24)):
        data = [tiny.datum(tiny.tokens(31, seed)) for seed in range(count)]
        adapter, kept = tiny.trained_adapter(engine), Kept()
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda box: box[0]):
            if what == "custom":
                tiny.run_custom(engine, adapter, data, quadratic)
            else:
                tiny.run(engine, ops.ForwardBackward(adapter, data, CrossEntropy()))
        most[what, count] = kept.most
    assert most["custom", 24] < 1.05 * most["custom", 6]
    assert most["custom", 24] < 1.05 * most["built-in", 24]


@pytest.mark.parametrize("max_tokens_per_pass", [1, 30, 1000])
def test_a_custom_loss_in_any_passes_has_the_gradient_of_one(max_tokens_per_pass: int) -> None:
    engine, cut = tiny.engine(), tiny.engine(max_tokens_per_pass=max_tokens_per_pass)
    whole, other = tiny.trained_adapter(engine), tiny.trained_adapter(cut)
    data = [tiny.datum(s) for s in SEQUENCES]
    expected = tiny.run_custom(engine, whole, data, quadratic)
    output = tiny.run_custom(cut, other, data, quadratic)
    assert output.loss_fn_outputs == expected.loss_fn_outputs  # to the bit
    assert output.metrics == expected.metrics
    assert whole.gradients is not None
    assert_same(other.gradients, whole.gradients, tolerance=1e-5)


def test_the_gradient_of_a_custom_loss_is_that_of_the_built_in_one_to_the_bit() -> None:
    """In the same passes, be they one or many, and with one datum a pass however the data come."""

    def negative_sum(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return -torch.stack([p.sum() for p in logprobs]).sum(), {}

    data = [tiny.datum(s) for s in SEQUENCES]
    for settings in ({}, {"max_tokens_per_pass": 30}, {"micro_batch_invariant": True}):
        engine = tiny.engine(**settings)
        built_in, custom, alone = (tiny.trained_adapter(engine) for _ in range(3))
        tiny.run(engine, ops.ForwardBackward(built_in, data, CrossEntropy()))
        tiny.run_custom(engine, custom, data, negative_sum)
        for datum in data:
            tiny.run_custom(engine, alone, [datum], negative_sum)
        for other in (custom, alone) if "micro_batch_invariant" in settings else (custom,):
            assert built_in.gradients is not None
            assert other.gradients is not None
            assert all(torch.equal(tensor, other.gradients[name]) for name, tensor in built_in.gradients.items())


def test_a_custom_loss_over_more_than_fits_is_computed_in_smaller_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine()
    reference, adapter = tiny.trained_adapter(engine), tiny.trained_adapter(engine)
    data = [tiny.datum(s) for s in SEQUENCES]
    expected = tiny.run_custom(engine, reference, data, quadratic)
    limit_tokens(monkeypatch, 30)
    output = tiny.run_custom(engine, adapter, data, quadratic)
    assert output.loss_fn_outputs == expected.loss_fn_outputs
    assert reference.gradients is not None
    assert_same(adapter.gradients, reference.gradients, tolerance=1e-5)
    with pytest.raises(InvalidRequest, match="60 tokens does not fit"):
        tiny.run_custom(engine, adapter, [tiny.datum(tiny.tokens(61, 0))], quadratic)


def limit_tokens(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A machine on which no larger pass fits."""
    model = type(tiny.base_model())
    original = model.hidden_states

    def limited(self: object, packed: Pack, *rest: object) -> Tensor:
        if packed.num_tokens > most:
            raise torch.OutOfMemoryError("no room")
        return original(self, packed, *rest)  # pyright: ignore[reportArgumentType]  a stand-in for the method

    monkeypatch.setattr(model, "hidden_states", limited)


def test_forward_leaves_no_gradient_and_gives_the_same_logprobs() -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    forward = tiny.run(engine, ops.Forward(adapter, RL_DATA, ImportanceSampling()))
    assert adapter.gradients is None
    both = tiny.run(engine, ops.ForwardBackward(adapter, RL_DATA, ImportanceSampling()))
    assert forward.loss_fn_outputs == both.loss_fn_outputs


def test_factors_gradients_and_moments_of_a_bfloat16_model_are_float32() -> None:
    engine = Engine(adopt(tiny.llama().bfloat16(), "tiny-bf16", fingerprint="bf16"))
    adapter = tiny.trained_adapter(engine)
    tiny.run(engine, ops.ForwardBackward(adapter, RL_DATA, ImportanceSampling()))
    assert adapter.gradients is not None
    dtypes = {tensor.dtype for tensor in adapter.gradients.values()}
    tiny.run(engine, ops.OptimStep(adapter, tiny.SGD))
    for tensors in (adapter.weights.tensors, adapter.moments.mean, adapter.moments.square):
        dtypes |= {tensor.dtype for tensor in tensors.values()}
    assert dtypes == {torch.float32}


def test_recomputing_activations_changes_no_bit_and_keeps_less() -> None:
    def trained(recompute: bool) -> tuple[Adapter, int]:
        engine = Engine(adopt(tiny.llama(num_hidden_layers=4), "tiny", fingerprint=""), recompute=recompute)
        adapter, kept = tiny.trained_adapter(engine), 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            tiny.run(engine, ops.ForwardBackward(adapter, RL_DATA, ImportanceSampling()))
        return adapter, kept

    (keeping, kept), (recomputing, kept_less) = trained(False), trained(True)
    assert keeping.gradients is not None
    assert recomputing.gradients is not None
    assert all(torch.equal(tensor, recomputing.gradients[name]) for name, tensor in keeping.gradients.items())
    assert kept_less < kept / 2


def test_a_batch_that_does_not_fit_is_halved_until_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny.engine()
    adapter, reference = tiny.trained_adapter(engine), tiny.trained_adapter(engine)
    expected = tiny.run(engine, ops.ForwardBackward(reference, RL_DATA, ImportanceSampling()))
    limit_tokens(monkeypatch, 30)
    output = tiny.run(engine, ops.ForwardBackward(adapter, RL_DATA, ImportanceSampling()))
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert [o["logprobs"].shape for o in output.loss_fn_outputs] == [
        o["logprobs"].shape for o in expected.loss_fn_outputs
    ]
    assert reference.gradients is not None
    assert_same(adapter.gradients, reference.gradients, tolerance=1e-5)
    assert "does not fit into memory: trying two halves" in caplog.text
    with pytest.raises(InvalidRequest, match="60 tokens does not fit"):
        tiny.run(engine, ops.ForwardBackward(adapter, [tiny.rl_datum(tiny.tokens(61, 0), 0)], ImportanceSampling()))


def test_logits_never_exist_for_more_rows_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of a pass has the size of a chunk, whatever the number of tokens."""
    monkeypatch.setattr(logprobs, "chunk_rows", lambda _: 16)
    rows: list[int] = []
    original = logprobs.Head.logits

    def counted(self: logprobs.Head, hidden_CE: Tensor) -> Tensor:
        rows.append(hidden_CE.shape[0])
        return original(self, hidden_CE)

    monkeypatch.setattr(logprobs.Head, "logits", counted)
    engine = tiny.engine()
    data = [tiny.rl_datum(tiny.tokens(100, 0), 0)]
    tiny.run(engine, ops.ForwardBackward(tiny.trained_adapter(engine), data, ImportanceSampling()))
    assert max(rows) == 16
    assert sum(rows) == 2 * 99


def test_a_state_of_other_linears_is_not_loaded_into_an_adapter() -> None:
    """A PEFT folder may train a part of what the flags say."""
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    fewer = {name: t for name, t in adapter.weights.tensors.items() if "k_proj" not in name}
    before = adapter.weights
    with pytest.raises(CheckpointError, match=r"other linears .*k_proj"):
        adapter.adapter.restore(replace(adapter.weights, tensors=fewer), adapter.moments)
    assert adapter.weights is before
