import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from renderers.families import qwen3_image_processor
from renderers.languages import chatml, save
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import InvalidRequest
from stovetop.preference.comparison_renderer import ComparisonRendererFromChatRenderer
from stovetop.preference.datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonDatasetBuilderFromRows,
    DPODataset,
    DPODatasetBuilderFromComparisons,
    comparison_to_datum,
    comparison_to_pair,
    comparisons_from_jsonl,
    preference_model_dataset,
    with_mismatched,
)
from stovetop.preference.types import (
    Comparison,
    LabeledComparison,
    labeled_comparison_from_json,
    labeled_comparison_to_json,
)
from stovetop.renderers.images import image_part
from stovetop.renderers.messages import Message, TextPart
from stovetop.supervised.logprobs import full_sequence
from stovetop.types import Datum, ImageChunk, ModelInput

from .examples import RENDERER, comparison, labeled, said

JUDGED = ComparisonRendererFromChatRenderer(RENDERER)


def text(datum: Datum) -> str:
    return ByteTokenizer().decode(full_sequence(datum).to_ints())


def trained_text(datum: Datum) -> str:
    inputs = {name: tensor.array for name, tensor in datum.loss_fn_inputs.items()}
    return ByteTokenizer().decode(inputs["target_tokens"][inputs["weights"] != 0].tolist())


def write(path: Path, comparisons: Sequence[LabeledComparison]) -> str:
    path.write_text("".join(json.dumps(labeled_comparison_to_json(one)) + "\n" for one in comparisons))
    return str(path)


# ---- pairs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["A", "B"])
def test_a_pair_is_the_chosen_answer_then_the_rejected_one(label):
    chosen, rejected = comparison_to_pair(labeled(label, a="first", b="second"), RENDERER)
    answers = ["first<|im_end|>", "second<|im_end|>"]
    assert [trained_text(chosen), trained_text(rejected)] == (answers if label == "A" else answers[::-1])
    assert text(chosen).startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")


def test_weights_of_a_pair_are_ones_whatever_the_length():
    for datum in comparison_to_pair(labeled(a="x" * 40), RENDERER):
        assert set(datum.loss_fn_inputs["weights"].array.tolist()) == {0.0, 1.0}


def test_only_what_the_assistant_says_after_the_prompt_is_trained():
    prompt = [said("user", "q"), said("assistant", "earlier"), said("user", "q2")]
    turns = [said("assistant", "one"), said("user", "more"), said("assistant", "two")]
    chosen, _ = comparison_to_pair(
        LabeledComparison(Comparison(prompt, turns, [said("assistant", "b")]), "A"), RENDERER
    )
    assert trained_text(chosen) == "one<|im_end|>two<|im_end|>"


def test_making_a_pair_leaves_the_messages_as_they_were():
    one = labeled()
    comparison_to_pair(one, RENDERER)
    assert one == labeled()


def test_pairs_may_be_about_an_image(tmp_path):
    save(chatml(), tmp_path)
    qwen3_image_processor().save_pretrained(tmp_path)
    asked = Message(role="user", content=[image_part(Image.new("RGB", (64, 64))), TextPart(type="text", text="?")])
    path = write(
        tmp_path / "pairs.jsonl",
        [LabeledComparison(Comparison([asked], [said("assistant", "a")], [said("assistant", "b")]), "A")],
    )
    train, _ = DPODatasetBuilderFromComparisons(
        comparison_builder=comparisons_from_jsonl(path),
        model_name_for_tokenizer=str(tmp_path),
        renderer_name="qwen3_vl",
        batch_size=1,
        model_name_for_images=str(tmp_path),
    )()
    for datum in train.get_batch(0):
        assert [chunk.length for chunk in datum.model_input.chunks if isinstance(chunk, ImageChunk)] == [4]
        assert len(datum.loss_fn_inputs["weights"].array) == datum.model_input.length


@pytest.mark.parametrize("swap", [True, False])
def test_a_preference_model_trains_on_both_orders_if_told_so_and_is_tested_on_both(swap, tmp_path):
    save(chatml(), tmp_path)
    path = write(tmp_path / "comparisons.jsonl", [labeled("A", f"q{index}") for index in range(5)])
    train, test = ChatDatasetBuilderFromComparisons(
        comparison_builder=comparisons_from_jsonl(path, test_size=2),
        model_name_for_tokenizer=str(tmp_path),
        renderer_name="qwen3_instruct",
        batch_size=2,
        swap=swap,
    )()
    assert [len(train.get_batch(index)) for index in range(len(train))] == ([4, 2] if swap else [2, 1])
    assert test is not None
    assert [len(test.get_batch(index)) for index in range(len(test))] == [4]
    labels = [int(datum.loss_fn_inputs["target_tokens"].array[-1]) for datum in test.get_batch(0)]
    assert labels == [labels[0], labels[1]] * 2
    assert labels[0] != labels[1]
    path = write(tmp_path / "few.jsonl", [labeled("A")])
    assert (
        ChatDatasetBuilderFromComparisons(
            comparison_builder=comparisons_from_jsonl(path),
            model_name_for_tokenizer=str(tmp_path),
            renderer_name="qwen3_instruct",
            batch_size=1,
        )()[1]
        is None
    )


def test_a_tie_makes_no_pair_and_is_counted():
    comparisons = [labeled("A", "q1"), labeled("Tie", "q2"), labeled("B", "q3"), labeled("Tie", "q4")]
    assert comparison_to_pair(comparisons[1], RENDERER) == []
    dataset = DPODataset(comparisons, 2, RENDERER)
    assert dataset.num_ties == 2
    assert len(dataset) == 1
    assert all("q1" in text(datum) or "q3" in text(datum) for datum in dataset.get_batch(0))


@given(st.lists(st.sampled_from(["A", "B", "Tie"]), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 3))
def test_pairs_stay_interleaved_in_every_epoch_and_batch(labels, batch_size, epoch):
    comparisons = [
        labeled(label, f"q{index}", *(("good", "bad") if label == "A" else ("bad", "good")))
        for index, label in enumerate(labels)
    ]
    if len(labels) == labels.count("Tie"):
        return
    dataset = DPODataset(comparisons, min(batch_size, len(labels) - labels.count("Tie")), RENDERER, drop_last=False)
    dataset.set_epoch(epoch)
    seen: list[str] = []
    for batch in map(dataset.get_batch, range(len(dataset))):
        for chosen, rejected in zip(batch[0::2], batch[1::2], strict=True):
            assert trained_text(chosen) == "good<|im_end|>"
            assert text(chosen).replace("good", "bad") == text(rejected)
            seen.append(text(chosen))
    assert len(set(seen)) == len(seen) == len(labels) - labels.count("Tie")


def test_a_pair_whose_answer_is_cut_off_is_left_out_with_its_row_and_the_reason():
    pairs = [labeled("A", "q"), labeled("A", "q" * 99), labeled("A", "q")]
    dataset = DPODataset(pairs, 1, RENDERER, max_length=80)
    assert len(dataset) == 2
    assert list(dataset.untrainable) == [1]
    assert dataset.untrainable[1].startswith("row 1: max_length=80 cuts off all")
    with pytest.raises(InvalidRequest, match="row 0: max_length=8 cuts off all"):
        DPODataset([labeled()], 1, RENDERER, max_length=8)
    with pytest.raises(InvalidRequest, match="row 1: max_length=80 cuts off all"):
        DPODataset(pairs, 3, RENDERER, max_length=80, on_untrainable="refuse").get_batch(0)


def test_comparisons_whose_label_is_cut_off_are_left_out():
    comparisons = [labeled("A", "q"), labeled("A", "q" * 500), labeled("B", "q")]
    dataset = preference_model_dataset(comparisons, 2, JUDGED, max_length=300)
    assert len(dataset) == 1
    assert len(dataset.get_batch(0)) == 4


def test_an_answer_that_is_cut_short_is_counted_and_said(caplog):
    whole = comparison_to_pair(labeled(a="long enough", b="short"), RENDERER)
    limit = whole[0].model_input.length - 3
    dataset = DPODataset([labeled(a="long enough", b="short"), labeled(a="a", b="b")], 2, RENDERER, max_length=limit)
    lengths = [datum.model_input.length for datum in dataset.get_batch(0)]
    assert max(lengths) == limit - 1
    assert dataset.num_cut == 1
    assert "more than max_length" in caplog.text


# ---- answers to other prompts --------------------------------------------------------------------------------


def pair(number: int) -> list[Datum]:
    return comparison_to_pair(labeled("A", f"q{number}", f"good{number}", f"bad{number}"), RENDERER)


def test_mismatched_answers_are_those_of_the_next_pair():
    data = [*pair(0), *pair(1), *pair(2)]
    both = with_mismatched(data)
    assert both[:6] == data
    assert [trained_text(datum).removesuffix("<|im_end|>") for datum in both[6:]] == [
        "good1", "bad1", "good2", "bad2", "good0", "bad0",
    ]  # fmt: skip
    assert [text(own).split("assistant\n")[0] for own in data] == [
        text(one).split("assistant\n")[0] for one in both[6:]
    ]


@given(st.integers(2, 7))
def test_no_answer_meets_its_own_prompt(num_pairs):
    data = [datum for number in range(num_pairs) for datum in pair(number)]
    for own, mismatched in zip(data, with_mismatched(data)[len(data) :], strict=True):
        assert trained_text(own) != trained_text(mismatched)
        assert mismatched.loss_fn_inputs["weights"].array.sum() == len(trained_text(mismatched).split("<|")[0]) + 1


@pytest.mark.parametrize("num_pairs", [0, 1])
def test_one_pair_has_no_other_prompt(num_pairs):
    with pytest.raises(InvalidRequest, match="need at least two pairs"):
        with_mismatched([datum for number in range(num_pairs) for datum in pair(number)])


def test_an_answer_without_a_token_cannot_be_mismatched():
    nothing = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "weights": [0.0]})
    with pytest.raises(InvalidRequest, match=r"needs a token with a weight; this datum has none: \[1, 2\]"):
        with_mismatched([nothing] * 4)


# ---- data for a preference model -----------------------------------------------------------------------------


def test_a_preference_model_learns_the_label_alone():
    datum = comparison_to_datum(labeled("B"), JUDGED)
    assert trained_text(datum) == "B"
    assert datum.loss_fn_inputs["weights"].array[-1] == 1
    assert datum.model_input == JUDGED.build_generation_prompt(comparison())


def test_swapping_doubles_the_data_and_ties_count():
    comparisons = [labeled("A", "q1"), labeled("Tie", "q2")]
    one_way = preference_model_dataset(comparisons, 2, JUDGED, swap=False).get_batch(0)
    both_ways = preference_model_dataset(comparisons, 2, JUDGED, swap=True).get_batch(0)
    assert sorted(map(trained_text, one_way)) == ["A", "T"]
    assert sorted(map(trained_text, both_ways)) == ["A", "B", "T", "T"]


def test_a_comparison_that_lost_its_label_is_refused():
    with pytest.raises(InvalidRequest, match="max_length=20 cuts off all that would be trained on"):
        comparison_to_datum(labeled(), JUDGED, max_length=20)


# ---- rows ----------------------------------------------------------------------------------------------------


def test_comparisons_come_back_from_jsonl(tmp_path):
    train, test = [labeled("A", "q1"), labeled("Tie", "q2")], [labeled("B", "q3")]
    builder = comparisons_from_jsonl(write(tmp_path / "train.jsonl", train), write(tmp_path / "test.jsonl", test))
    loaded = builder.get_labeled_comparisons()
    assert sorted(map(str, loaded.train)) == sorted(map(str, train))
    assert (loaded.test, loaded.num_skipped) == (test, 0)


def test_a_split_of_one_source_is_the_same_each_time_and_shares_nothing(tmp_path):
    path = write(tmp_path / "all.jsonl", [labeled("A", f"q{index}") for index in range(10)])
    first, again = (comparisons_from_jsonl(path, test_size=3).get_labeled_comparisons() for _ in range(2))
    assert first == again
    assert (len(first.train), len(first.test)) == (7, 3)
    assert not set(map(str, first.train)) & set(map(str, first.test))


def test_the_rows_themselves_come_in_the_sets_and_the_order_of_their_comparisons(tmp_path):
    path = write(tmp_path / "all.jsonl", [labeled("A", f"q{index}") for index in range(10)])
    builder = comparisons_from_jsonl(path, test_size=3)
    rows, loaded = builder.get_train_and_test_datasets(), builder.get_labeled_comparisons()
    assert [labeled_comparison_from_json(row) for row in rows.train] == list(loaded.train)
    assert [labeled_comparison_from_json(row) for row in rows.test] == list(loaded.test)


def test_a_row_of_jsonl_that_is_no_comparison_is_an_error_that_shows_it(tmp_path):
    path = tmp_path / "train.jsonl"
    write(path, [labeled()])
    path.write_text(path.read_text() + '{"label": "A"}\n')
    with pytest.raises(InvalidRequest, match=r"train.jsonl: row needs 'comparison'.*: \{'label': 'A'\}"):
        comparisons_from_jsonl(str(path)).get_labeled_comparisons()


def test_rows_without_a_use_are_left_out_and_counted(tmp_path, caplog):
    path = write(tmp_path / "all.jsonl", [labeled("A", f"q{index}") for index in range(4)])
    kept = iter([labeled("A"), None, None, labeled("B")])
    builder = ComparisonDatasetBuilderFromRows(source=path, example_to_labeled_comparison=lambda row: next(kept))
    loaded = builder.get_labeled_comparisons()
    assert (len(loaded.train), loaded.num_skipped) == (2, 2)
    assert "2 of 4 rows" in caplog.text


def test_a_source_without_any_comparison_is_refused(tmp_path):
    path = write(tmp_path / "all.jsonl", [labeled()])
    builder = ComparisonDatasetBuilderFromRows(source=path, example_to_labeled_comparison=lambda row: None)
    with pytest.raises(InvalidRequest, match="none of the 1 rows to train on is a comparison"):
        builder.get_labeled_comparisons()


def test_mismatched_data_of_tokens_alone():
    def datum(*tokens: int) -> Datum:
        weights = np.float32([0] * (len(tokens) - 2) + [1])
        return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})

    mismatched = with_mismatched([datum(1, 2, 3), datum(1, 2, 4), datum(5, 6), datum(5, 7)])[4:]
    assert [full_sequence(one).to_ints() for one in mismatched] == [[1, 2, 6], [1, 2, 7], [5, 3], [5, 4]]
