# pyright: basic
"""A custom loss in two ops. One graph may wait for it, any other pass is computed again: both give the same bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from costly import slow_but
from engine import tiny
from stovetop.backends.custom_loss import judge
from stovetop.engine import ops
from stovetop.engine.adapters import Adapters
from stovetop.engine.engine import Engine
from stovetop.engine.training import trainer
from stovetop.losses import CrossEntropy, parse_loss
from stovetop.types import Datum

SEEDS = range(2)


def quadratic(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> Any:
    return sum(((p + 1) ** 2).sum() for p in logprobs), {}


def data_of(seed: int, count: int = 1) -> list[Datum]:
    return [tiny.datum(tiny.tokens(20 + 7 * seed + index, seed + index)) for index in range(count)]


def score_it(engine: Engine, adapter: Any, data: Sequence[Datum]) -> ops.BackwardFrom:
    """The op that answers the score."""
    scored = ops.ScoreId(f"of {adapter}")
    output = tiny.run(engine, ops.Score(adapter, data, scored))
    return ops.BackwardFrom(
        adapter, scored, judge(quadratic, data, [each["logprobs"] for each in output.loss_fn_outputs]).gradients
    )


def num_graphs(engine: Engine) -> int:
    scores = vars(engine.adapters)["_scored"].values()
    return sum(scored.graph is not None for scored in scores)


@pytest.mark.parametrize(
    ("settings", "count"),
    slow_but(1, [({}, 3), ({}, 1), ({"micro_batch_invariant": True}, 2), ({"max_adapter_bytes": 0}, 1)]),
)
def test_clients_whose_losses_overlap_get_the_bits_that_each_gets_alone(
    settings: dict[str, Any], count: int, tmp_path: Path
) -> None:
    """Some go back from the graph that was kept, some compute the pass again, others train meanwhile at a temperature
    of their own, and adapters may have been moved out of memory between the passes."""
    warm = parse_loss("importance_sampling", {"temperature": 0.7})

    def trained(seeds: Sequence[int], *, at_once: bool) -> list[dict[str, torch.Tensor]]:
        engine = tiny.engine(idle_folder=tmp_path, **settings)
        adapters = {seed: tiny.trained_adapter(engine, seed) for seed in seeds}
        for _ in range(2):  # at the second, B is not zero any more, and there are moments
            answers: list[ops.BackwardFrom] = []
            for seed, adapter in adapters.items():
                answers.append(score_it(engine, adapter, data_of(seed, count)))
                if not at_once:
                    tiny.run(engine, answers.pop())
                else:
                    assert num_graphs(engine) <= 1
            bystander = tiny.trained_adapter(engine, 9)
            tiny.run(engine, ops.ForwardBackward(bystander, [tiny.rl_datum(tiny.tokens(30, 5), 5)], warm))
            for answer in reversed(answers):
                tiny.run(engine, answer)
            for adapter in adapters.values():
                tiny.run(engine, ops.OptimStep(adapter, tiny.SGD))
        assert num_graphs(engine) == 0
        return [{name: t.clone() for name, t in adapter.weights.tensors.items()} for adapter in adapters.values()]

    together = trained(SEEDS, at_once=True)
    for seed, weights in zip(SEEDS, together, strict=True):
        (alone,) = trained([seed], at_once=False)
        assert all(torch.equal(alone[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("settings", [{}, {"micro_batch_invariant": True}])
def test_a_pass_computed_again_gives_the_bits_of_the_graph_that_was_kept(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = []
    for keeps in (True, False):
        engine = tiny.engine(**settings)
        adapter = tiny.trained_adapter(engine)
        with monkeypatch.context() as patched:
            if not keeps:
                patched.setattr(Adapters, "_may_keep", lambda self, micro_batches: False)
            answer = score_it(engine, adapter, data_of(1))
        assert num_graphs(engine) == keeps
        tiny.run(engine, answer)
        gradients.append(adapter.gradients)
    assert all(torch.equal(tensor, gradients[1][name]) for name, tensor in gradients[0].items())


def test_a_graph_from_which_the_way_back_does_not_fit_is_let_go_and_the_pass_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny.engine()
    crowded, usual = tiny.trained_adapter(engine), tiny.trained_adapter(engine)
    tiny.run(engine, score_it(engine, usual, data_of(1)))
    answer = score_it(engine, crowded, data_of(1))
    assert num_graphs(engine) == 1
    tries: list[int] = []
    original = trainer._gradients  # pyright: ignore[reportPrivateUsage]  what needs the memory

    def no_room_at_first(*arguments: Any) -> Any:
        tries.append(num_graphs(engine))
        if len(tries) == 1:
            raise torch.OutOfMemoryError("no room")
        return original(*arguments)

    monkeypatch.setattr(trainer, "_gradients", no_room_at_first)
    tiny.run(engine, answer)
    assert len(tries) == 2
    assert num_graphs(engine) == 0
    assert all(torch.equal(tensor, usual.gradients[name]) for name, tensor in crowded.gradients.items())


def test_logprobs_whose_graph_does_not_fit_are_computed_in_halves_and_no_graph_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, data = tiny.engine(), data_of(0, count=3)
    crowded, usual = tiny.trained_adapter(engine), tiny.trained_adapter(engine)
    expected = score_it(engine, usual, data)
    assert num_graphs(engine) == 1
    tiny.run(engine, expected)
    hidden_states = type(vars(engine)["_model"]).hidden_states

    def no_room_for_a_graph(model: Any, packed: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and packed.num_tokens > 48:  # two of them
            raise torch.OutOfMemoryError("no room")
        return hidden_states(model, packed, *arguments)

    monkeypatch.setattr(type(vars(engine)["_model"]), "hidden_states", no_room_for_a_graph)
    answer = score_it(engine, crowded, data)
    assert num_graphs(engine) == 0
    assert answer.gradients == expected.gradients
    tiny.run(engine, answer)
    for name, tensor in crowded.gradients.items():
        assert (tensor - usual.gradients[name]).norm() <= 1e-5 * usual.gradients[name].norm(), "but for rounding"


@pytest.mark.parametrize("answer", ["BackwardFrom", "Spoil", "TakeBack"])
def test_an_answer_to_a_loss_of_an_adapter_that_is_not_there_leaves_nothing(answer: str) -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    backward = score_it(engine, adapter, data_of(1))
    del engine.adapters.by_id[adapter]
    op = {
        "BackwardFrom": backward,
        "Spoil": ops.Spoil(adapter, "no reason", backward.scored),
        "TakeBack": ops.TakeBack(adapter, backward.scored),
    }[answer]
    with pytest.raises(Exception, match="there is no adapter of this name"):
        tiny.run(engine, op)
    assert not vars(engine.adapters)["_scored"]
    assert engine.idle


def test_a_graph_that_waits_makes_room_for_the_pass_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is memory that the other would have if there were no loss."""
    engine = tiny.engine()
    waiting, other, alone = (tiny.trained_adapter(engine) for _ in range(3))
    tiny.run(engine, score_it(engine, alone, data_of(1)))
    answer = score_it(engine, waiting, data_of(1))
    assert num_graphs(engine) == 1
    hidden_states = type(vars(engine)["_model"]).hidden_states

    def crowded(model: Any, *arguments: Any) -> Any:
        if num_graphs(engine) > 0:
            raise torch.OutOfMemoryError("no room")
        return hidden_states(model, *arguments)

    monkeypatch.setattr(type(vars(engine)["_model"]), "hidden_states", crowded)
    tiny.run(engine, ops.ForwardBackward(other, data_of(2), CrossEntropy()))
    tiny.run(engine, answer)
    assert num_graphs(engine) == 0
    assert all(torch.equal(tensor, alone.gradients[name]) for name, tensor in waiting.gradients.items())
