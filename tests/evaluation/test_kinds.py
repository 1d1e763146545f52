"""Chats that are read, labels, and answers that a judge compares."""

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.evaluation.chats import HeldOutChats
from stovetop.evaluation.example_set import Reported, evaluate
from stovetop.evaluation.labels import NO_LABEL, PREDICTED, LabelEnv, LabelSet, read_label
from stovetop.evaluation.pairwise import PairwiseSet
from stovetop.evaluation.problems import ProblemSet
from stovetop.evaluation.rows import ExampleRow, Sample
from stovetop.evaluators import classification_report
from stovetop.preference.judge import JudgeCompleter, read_verdict
from stovetop.preference.reward_model import Verdict
from stovetop.preference.types import Comparison
from stovetop.renderers.messages import Message, get_text_content
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.problem_env import ProblemGroupBuilder
from stovetop.supervised.data import conversation_to_datum
from stovetop.supervised.nll import NLLEvaluator

RENDERER = ChatTemplateRenderer(ByteTokenizer())


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="some/model").result()


def chat(*texts: str) -> list[Message]:
    return [Message(role=("user", "assistant")[index % 2], content=text) for index, text in enumerate(texts)]


# ---- chats -----------------------------------------------------------------------------------------------------------


def test_the_loss_of_held_out_chats_is_that_of_the_evaluator_of_training(client: TrainingClient):
    chats = [chat("hello", "goodbye"), chat("a", "b", "c", "a long answer, ünlike others")]
    data = [conversation_to_datum(each, RENDERER, None, reduction="none") for each in chats]
    expected = asyncio.run(NLLEvaluator(data, tokenizer=RENDERER.tokenizer)(client))
    sampler = client.save_weights_and_get_sampling_client().result()
    held_out = HeldOutChats("chats", {str(index): datum for index, datum in enumerate(data)}, RENDERER.tokenizer)
    found = asyncio.run(evaluate(held_out, sampler)).metrics
    assert found["nll"].value == pytest.approx(expected["test/nll"])
    assert found["bpb"].value == pytest.approx(expected["test/bpb"])
    assert found["nll"].stderr is not None


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "label"), [(" Spam.", 1), ("ham\n", 0), ("It is ham", None), ("", None), ("ham or spam", None)]
)
def test_an_answer_is_a_label_or_none(said: str, label: int | None):
    assert read_label(said, ["ham", "spam"]) == label


def test_a_report_has_the_values_of_a_confusion_matrix_computed_by_hand():
    # expected cat: 2 cat, 1 dog. dog: 1 dog, 1 none. fox: 1 cat
    expected = ["cat", "cat", "cat", "dog", "dog", "fox"]
    predicted = ["cat", "cat", "dog", "dog", NO_LABEL, "cat"]
    report = classification_report(expected, predicted)
    assert report.confusion == {
        ("cat", "cat"): 2, ("cat", "dog"): 1, ("dog", "dog"): 1, ("dog", NO_LABEL): 1, ("fox", "cat"): 1,
    }  # fmt: skip
    of = {label.label: label for label in report.labels}
    assert of["cat"][1:] == pytest.approx((2 / 3, 2 / 3, 2 / 3, 3, 3))
    assert of["dog"][1:] == pytest.approx((1 / 2, 1 / 2, 1 / 2, 2, 2))
    assert of["fox"][1:] == (0, 0, 0, 1, 0)
    assert of[NO_LABEL][1:] == (0, 0, 0, 0, 1)
    assert report.macro() == pytest.approx(
        {"accuracy": 3 / 6, "precision": 7 / 24, "recall": 7 / 24, "f1": 7 / 24}  # (2/3 + 1/2 + 0 + 0) / 4
    )


def label_set(expected: dict[str, str], labels: Sequence[str] = ("ham", "spam")) -> LabelSet:
    groups = {
        id: ProblemGroupBuilder(partial(LabelEnv, chat(f"Is {id} spam?"), labels, label, RENDERER), 1)
        for id, label in expected.items()
    }
    reported = Reported(correct="correct")
    return LabelSet(ProblemSet("mail", groups, RENDERER.tokenizer, 3, reported, 1.0), labels, expected)


def said(id: str, predicted: int, correct: float) -> ExampleRow:
    return ExampleRow(id, 0, (Sample({PREDICTED: predicted, "correct": correct}),))


def test_the_metrics_of_labels_are_those_of_what_was_said():
    of_mail = label_set({"a": "ham", "b": "ham", "c": "spam"})
    found = of_mail.metrics([said("a", 0, 1.0), said("b", 1, 0.0), said("c", 1, 1.0)])
    assert found["pass@1"].value == pytest.approx(2 / 3)
    assert [found[name] for name in ("precision", "recall", "f1")] == [
        (pytest.approx(value), None) for value in (0.75, 0.75, 2 / 3)
    ]
    assert of_mail.report([said("a", -1, 0.0)]).confusion == {("ham", NO_LABEL): 1}


def test_a_label_is_asked_for_and_scored(sampler: SamplingClient):
    """The fake model says one of its bytes: a set of all of them as labels is answered by one."""
    labels = [chr(code) for code in range(33, 127)]
    found = asyncio.run(evaluate(label_set({id: "A" for id in "abcdefgh"}, labels), sampler))
    assert all(-1 <= row.samples[0].scores[PREDICTED] < len(labels) for row in found.rows)
    assert found.metrics.keys() == {"pass@1", "precision", "recall", "f1"}


# ---- pairwise --------------------------------------------------------------------------------------------------------


def comparison(answer: str = "x") -> Comparison:
    reference = [Message(role="assistant", content=answer)]
    return Comparison([Message(role="user", content="q")], reference, reference)


def win_rate(sampler: SamplingClient, judge: JudgeCompleter, num_samples: int = 1) -> float:
    pairs = PairwiseSet(
        "pairs", {"0": comparison(), "1": comparison("y")}, judge, RENDERER, 2, 1.0, num_samples=num_samples
    )
    return asyncio.run(evaluate(pairs, sampler)).metrics["win_rate"].value


def judge_that(answers: str) -> JudgeCompleter:
    async def complete(messages: Sequence[Message]) -> Message:
        return Message(role="assistant", content=answers)

    return JudgeCompleter(complete)


def test_a_judge_that_always_prefers_the_first_answer_gives_half(sampler: SamplingClient):
    judge = judge_that("Both are fine. Verdict: A")
    assert win_rate(sampler, judge, num_samples=2) == 0.5
    assert (judge.num_asked, judge.num_without_answer) == (8, 0)


def test_a_judge_that_prefers_the_reference_gives_no_win_and_one_against_it_all(sampler: SamplingClient):
    def judge_for(wins: bool) -> JudgeCompleter:
        async def complete(messages: Sequence[Message]) -> Message:
            shown = get_text_content(messages[0]).partition("==== Answer A ====\n")[2]
            a_is_reference = shown.startswith(("assistant: x\n", "assistant: y\n"))
            return Message(role="assistant", content="Verdict: B" if a_is_reference == wins else "Verdict: A")

        return JudgeCompleter(complete)

    assert (win_rate(sampler, judge_for(True)), win_rate(sampler, judge_for(False))) == (1.0, 0.0)


def test_an_answer_without_a_verdict_is_a_tie_and_counted(sampler: SamplingClient):
    judge = judge_that("I cannot say")
    assert win_rate(sampler, judge) == 0.5
    assert judge.num_without_answer == judge.num_asked == 4


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("Verdict: A", Verdict.A), ("**Verdict: B.**", Verdict.B), ("tie", Verdict.TIE), ("a", Verdict.NONE),
     ("A is better", Verdict.NONE), ("", Verdict.NONE)],
)  # fmt: skip
def test_the_last_word_of_a_judge_is_its_verdict(text: str, verdict: Verdict):
    assert read_verdict(text) is verdict
