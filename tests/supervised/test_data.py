import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from renderers.families import qwen3_image_processor
from renderers.languages import chat, chatml, save, thinking
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import InvalidRequest, NothingToTrain, UnknownName
from stovetop.renderers.base import TrainOnWhat
from stovetop.renderers.images import image_part
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.supervised.data import (
    ChatDataset,
    ChatDatasetBuilderCommonConfig,
    FromConversationFileBuilder,
    InterleavedChatDatasetBuilder,
    SupervisedDatasetFromRows,
    conversation_to_datum,
    conversations_to_data,
    create_rightshifted_model_input_and_leftshifted_targets,
    data_of_chats,
    datum_from_model_input_weights,
)
from stovetop.types import Datum, EncodedTextChunk, ImageChunk, ModelInput

RENDERER = ChatTemplateRenderer(ByteTokenizer())
IMAGE = ImageChunk(b"", "png", expected_tokens=3)


def text(*tokens: int) -> EncodedTextChunk:
    return EncodedTextChunk(tokens)


def targets(datum: Datum) -> list[float]:
    return datum.loss_fn_inputs["target_tokens"].tolist()


def weights(datum: Datum) -> list[float]:
    return datum.loss_fn_inputs["weights"].tolist()


# ---- shifting ----------------------------------------------------------------------------------------------------


def test_each_position_predicts_the_next_token() -> None:
    model_input, target_tokens = create_rightshifted_model_input_and_leftshifted_targets([text(1, 2, 3)])
    assert (model_input.to_ints(), target_tokens) == ([1, 2], [2, 3])


def test_an_image_takes_its_positions_and_is_not_predicted() -> None:
    model_input, target_tokens = create_rightshifted_model_input_and_leftshifted_targets([text(1), IMAGE, text(2)])
    assert model_input.chunks == (text(1), IMAGE)
    assert target_tokens == [0, 0, 0, 2]


@pytest.mark.parametrize("chunks", [[], [text(1)], [text(1, 2), IMAGE], [text(1, 2), text()]])
def test_a_sequence_without_a_last_token_to_predict_is_refused(chunks: list[EncodedTextChunk]) -> None:
    with pytest.raises(InvalidRequest):
        create_rightshifted_model_input_and_leftshifted_targets(chunks)


@given(st.lists(st.integers(0, 9), min_size=2), st.data())
def test_a_shifted_sequence_is_as_long_as_its_targets_wherever_its_chunks_end(
    tokens: list[int], draw: st.DataObject
) -> None:
    border = draw.draw(st.integers(0, len(tokens) - 1))
    chunks = [text(*tokens[:border]), text(*tokens[border:])]
    model_input, target_tokens = create_rightshifted_model_input_and_leftshifted_targets(chunks)
    assert (model_input.to_ints(), target_tokens) == (tokens[:-1], tokens[1:])


# ---- one datum ---------------------------------------------------------------------------------------------------


def datum_of(chunks: list[EncodedTextChunk | ImageChunk], max_length: int | None) -> Datum:
    model_input = ModelInput(chunks)
    return datum_from_model_input_weights(model_input, np.ones(model_input.length, np.float32), max_length)


def test_a_datum_has_targets_and_weights_and_nothing_else() -> None:
    datum = conversation_to_datum(chat("q", "a"), RENDERER, max_length=None)
    assert set(datum.loss_fn_inputs) == {"target_tokens", "weights"}
    assert len(targets(datum)) == len(weights(datum)) == datum.model_input.length


def test_weights_move_with_their_tokens() -> None:
    datum = datum_from_model_input_weights(ModelInput.from_ints([1, 2, 3]), np.array([9, 0, 5], np.float32))
    assert targets(datum) == [2, 3]
    assert weights(datum) == [0, 5]


@pytest.mark.parametrize("max_length", [None, 4, 5])
def test_what_fits_is_kept_whole(max_length: int | None) -> None:
    assert targets(datum_of([text(1, 2), text(3, 4)], max_length)) == [2, 3, 4]


def test_too_long_a_text_is_cut_from_the_right() -> None:
    assert targets(datum_of([text(1, 2), text(3, 4, 5)], 4)) == [2, 3, 4]


def test_an_image_that_does_not_fit_is_left_out_with_all_behind_it() -> None:
    assert targets(datum_of([text(1, 2), IMAGE, text(3)], 4)) == [2]


def test_an_image_at_the_end_is_left_out() -> None:
    assert targets(datum_of([text(1, 2), IMAGE], None)) == [2]
    assert targets(datum_of([text(1, 2), IMAGE, text(3)], 5)) == [2]


def test_cutting_off_all_that_is_trained_is_refused_with_the_numbers() -> None:
    example = RENDERER.build_supervised_example(chat("q" * 50, "a"))
    with pytest.raises(InvalidRequest, match=r"max_length=40 cuts off .* first with a weight is number 70"):
        datum_from_model_input_weights(example.model_input, example.weights, 40)


def test_a_datum_without_a_trained_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="none of its 3 tokens has a weight"):
        datum_from_model_input_weights(ModelInput.from_ints([1, 2, 3]), np.array([1, 0, 0], np.float32))


def test_weights_must_be_as_many_as_tokens() -> None:
    with pytest.raises(InvalidRequest, match="differ in number: 2, 3"):
        datum_from_model_input_weights(ModelInput.from_ints([1, 2, 3]), np.ones(2, np.float32))


def test_weights_of_an_example_sum_to_one_unless_told_otherwise() -> None:
    messages = chat("q", "four")
    mean = conversation_to_datum(messages, RENDERER, None)
    assert [weight for weight in weights(mean) if weight] == pytest.approx([0.2] * 5)  # four bytes and the stop token
    assert sum(weights(conversation_to_datum(messages, RENDERER, None, reduction="none"))) == 5
    assert sum(weights(conversation_to_datum(messages, RENDERER, None, reduction="sum"))) == 5


def test_weights_that_have_no_mean_are_refused() -> None:
    for of_tokens in ([0, 1, -1], [0, np.nan, 1]):
        with pytest.raises(InvalidRequest, match="needs weights with a positive sum"):
            datum_from_model_input_weights(ModelInput.from_ints([1, 2, 3]), of_tokens, reduction="mean")


def test_a_misspelt_reduction_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'mean'"):
        conversation_to_datum(chat("q", "a"), RENDERER, None, reduction="means")  # pyright: ignore[reportArgumentType]  the point


def test_chats_become_data_in_their_order_and_as_many_as_their_renderer_needs() -> None:
    chats = [chat("q", "a", "r", "b"), chat("q", "c")]
    assert conversations_to_data(chats, RENDERER, None) == [conversation_to_datum(one, RENDERER, None) for one in chats]
    assert len(conversations_to_data(chats, ChatTemplateRenderer(thinking()), None)) == 3


def test_chats_that_make_no_datum_are_left_out_and_reported_by_their_number(caplog: pytest.LogCaptureFixture) -> None:
    chats = [chat("q", "a"), chat("only a question"), chat("q", "b"), chat("q" * 50, "a"), chat("q", "c")]
    by_chat = data_of_chats(chats, RENDERER, 40)
    assert by_chat.data_of_chat == [[conversation_to_datum(chats[index], RENDERER, None)] for index in (0, 2, 4)]
    assert list(by_chat.untrainable) == [1, 3]
    assert by_chat.untrainable[1].startswith("row 1: train_on_what=all_assistant_messages leaves no token")
    assert by_chat.untrainable[3].startswith("row 3: max_length=40 cuts off all")
    assert "2 of 5 rows have nothing to train on (rows 1, 3, counted from 0) and are left out" in caplog.messages[0]
    assert conversations_to_data(chats, RENDERER, 40) == [datum for [datum] in by_chat.data_of_chat]


@pytest.mark.parametrize("num_good", [0, 1])
def test_more_than_half_of_the_chats_without_anything_to_train_on_is_an_error(num_good: int) -> None:
    chats = [*[chat("q", "a")] * num_good, *[chat("only a question")] * 2]
    with pytest.raises(NothingToTrain, match=rf"2 of {2 + num_good} rows have nothing to train on .* more than half"):
        data_of_chats(chats, RENDERER, None)
    with pytest.raises(NothingToTrain, match="more than half"):
        ChatDataset(chats, 1, RENDERER)


def test_on_request_the_first_chat_that_makes_no_datum_is_an_error() -> None:
    chats = [chat("q", "a"), chat("only a question"), chat("q", "a")]
    with pytest.raises(NothingToTrain, match="row 1: train_on_what=all_assistant_messages leaves no token"):
        conversations_to_data(chats, RENDERER, None, on_untrainable="refuse")
    with pytest.raises(NothingToTrain, match="row 1: train_on_what=all_assistant_messages leaves no token"):
        ChatDataset(chats, 3, RENDERER, on_untrainable="refuse").get_batch(0)
    with pytest.raises(UnknownName, match="did you mean 'skip'"):
        conversations_to_data(chats, RENDERER, None, on_untrainable="skipp")  # pyright: ignore[reportArgumentType]  the point


def test_one_example_with_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(NothingToTrain, match="leaves no token"):
        conversation_to_datum(chat("only a question"), RENDERER, None)
    with pytest.raises(NothingToTrain, match="max_length=1 cuts off all"):
        conversation_to_datum(chat("q", "a"), RENDERER, 1)


def test_a_broken_chat_is_an_error_and_not_left_out() -> None:
    answer: list[Message] = [{"role": "assistant", "content": 3}]  # pyright: ignore[reportAssignmentType]  the point
    with pytest.raises(InvalidRequest, match="row 1: message 0: content must be"):
        conversations_to_data([chat("q", "a"), answer, chat("q", "a")], RENDERER, None)


def test_of_a_chat_that_makes_several_data_those_are_kept_that_fit() -> None:
    """The second answer lies beyond what fits; the first is trained, as it is where the chat makes one datum."""
    renderer = ChatTemplateRenderer(thinking())
    first, second = conversations_to_data([chat("q", "a", "r" * 50, "b")], renderer, None)
    assert conversations_to_data([chat("q", "a", "r" * 50, "b")], renderer, second.model_input.length - 6) == [first]


def test_chats_that_had_to_be_cut_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    data = conversations_to_data([chat("q", "a" * 100), chat("q", "a")], RENDERER, 80)
    assert [one.model_input.length for one in data] == [79, 22]
    assert caplog.messages == ["1 of 2 examples have more than max_length=80 tokens, and lost their end"]
    caplog.clear()
    conversations_to_data([chat("q", "a")], RENDERER, 23)  # just as many as it has
    assert caplog.messages == []


# ---- datasets ----------------------------------------------------------------------------------------------------


def datum(number: int) -> Datum:
    return datum_of([text(number, number)], None)


def numbers(batch: list[Datum]) -> list[int]:
    return [one.model_input.to_ints()[0] for one in batch]


def test_rows_come_in_numpys_order_for_the_epochs_seed() -> None:
    dataset = SupervisedDatasetFromRows(range(10), 4, map_fn=datum)
    for seed in (0, 1, 7):
        dataset.set_epoch(seed)
        order = np.random.default_rng(seed).permutation(10).tolist()
        batches = [numbers(dataset.get_batch(index)) for index in range(len(dataset))]
        assert batches == [order[:4], order[4:8], order[8:]]


def test_the_first_epoch_needs_no_call() -> None:
    dataset = SupervisedDatasetFromRows(range(4), 4, map_fn=datum)
    assert numbers(dataset.get_batch(0)) == [2, 0, 1, 3]  # of numpy's default_rng(0), written down


def test_a_last_batch_that_is_not_full_is_trained_unless_told_otherwise() -> None:
    kept = SupervisedDatasetFromRows(range(10), 4, map_fn=datum)
    assert [len(kept.get_batch(index)) for index in range(len(kept))] == [4, 4, 2]
    assert len(SupervisedDatasetFromRows(range(10), 4, map_fn=datum, drop_last=True)) == 2


def test_a_row_with_nothing_to_train_on_leaves_no_gap_in_any_batch() -> None:
    """Not even where a batch is one row."""

    def odd(number: int) -> Datum:
        if number % 3 == 0:
            raise NothingToTrain("a third")
        return datum(number)

    dataset = SupervisedDatasetFromRows(range(10), 1, map_fn=odd)
    assert sorted(numbers([one for index in range(6) for one in dataset.get_batch(index)])) == [1, 2, 4, 5, 7, 8]
    assert len(dataset) == 6
    assert dataset.untrainable == {index: f"row {index}: a third" for index in (0, 3, 6, 9)}


def test_the_data_of_one_row_stay_together() -> None:
    dataset = SupervisedDatasetFromRows(range(10), 5, flatmap_fn=lambda row: [datum(row), datum(row + 100)])
    batch = numbers(dataset.get_batch(0))
    assert len(batch) == 10
    assert [rejected - chosen for chosen, rejected in zip(batch[::2], batch[1::2], strict=True)] == [100] * 5


def test_a_dataset_takes_one_way_to_make_data() -> None:
    with pytest.raises(InvalidRequest, match="exactly one of map_fn and flatmap_fn"):
        SupervisedDatasetFromRows(range(4), 2)
    with pytest.raises(InvalidRequest, match="exactly one of map_fn and flatmap_fn"):
        SupervisedDatasetFromRows(range(4), 2, map_fn=datum, flatmap_fn=lambda row: [datum(row)])


def test_a_batch_larger_than_the_dataset_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"batch_size must be in 1\.\.4, the number of rows: 5"):
        SupervisedDatasetFromRows(range(4), 5, map_fn=datum, drop_last=True)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_batch_that_is_not_there_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"batch {index} of 2"):
        SupervisedDatasetFromRows(range(4), 2, map_fn=datum).get_batch(index)


def test_batch_size_counts_chats_however_many_data_they_make() -> None:
    dataset = ChatDataset([chat("q", "a", "r", "b")] * 5, 2, ChatTemplateRenderer(thinking()))
    assert [len(dataset.get_batch(index)) for index in range(len(dataset))] == [4, 4, 2]


def test_chats_become_the_data_that_their_renderer_needs() -> None:
    chats = [chat("q", "a", "r", "b")]
    assert len(ChatDataset(chats, 1, ChatTemplateRenderer(chatml())).get_batch(0)) == 1
    assert len(ChatDataset(chats, 1, ChatTemplateRenderer(thinking())).get_batch(0)) == 2


def test_many_cut_examples_are_reported_once_an_epoch_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    chats = [chat("q", "a" * (100 if index < 4 else 1)) for index in range(8)]
    dataset = ChatDataset(chats, 4, RENDERER, max_length=80)
    with caplog.at_level(logging.WARNING):
        for seed in (0, 1):
            dataset.set_epoch(seed)
            for index in range(len(dataset)):
                assert all(one.model_input.length < 80 for one in dataset.get_batch(index))
    assert len(caplog.messages) == 2
    assert "more than max_length=80 tokens, and lost their end" in caplog.messages[0]


@pytest.mark.parametrize(("num_chats", "num_warnings"), [(19, 1), (20, 0)])
def test_more_than_a_tenth_of_the_examples_cut_is_worth_a_warning(
    num_chats: int, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    chats = [chat("q", "a" * (100 if index < 2 else 1)) for index in range(num_chats)]
    ChatDataset(chats, num_chats, RENDERER, max_length=80).get_batch(0)
    assert len(caplog.messages) == num_warnings


# ---- from a file -------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> ChatDatasetBuilderCommonConfig:
    save(chatml(), tmp_path)
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=str(tmp_path), renderer_name="chat_template", batch_size=4
    )


def test_a_file_of_chats_is_split_into_two_that_share_none(
    tmp_path: Path, config: ChatDatasetBuilderCommonConfig
) -> None:
    """Seconds, if this is the first test that makes transformers load a tokenizer."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat("q", f"answer {index}")}) + "\n" for index in range(11)))
    train, test = FromConversationFileBuilder(common_config=config, file_path=str(path), test_size=3)()
    assert test is not None
    assert len(train) == 2
    assert len(test) == 1  # all three, in a batch that is not full
    trained = [tuple(targets(one)) for index in range(len(train)) for one in train.get_batch(index)]
    tested = [tuple(targets(one)) for one in test.get_batch(0)]
    assert len(set(trained)) == 8
    assert len(set(tested)) == 3
    assert not set(trained) & set(tested)


def test_without_a_test_size_there_is_no_test_set(tmp_path: Path, config: ChatDatasetBuilderCommonConfig) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": chat("q", "a")}) + "\n") * 4)
    _, test = FromConversationFileBuilder(common_config=config, file_path=str(path))()
    assert test is None


def test_a_line_without_messages_is_refused(tmp_path: Path, config: ChatDatasetBuilderCommonConfig) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "q"}]}\n{"text": "q"}\n')
    with pytest.raises(InvalidRequest, match=r"line 2.*messages"):
        FromConversationFileBuilder(common_config=config, file_path=str(path))()


def test_the_mode_of_training_is_the_configs(config: ChatDatasetBuilderCommonConfig) -> None:
    assert config.train_on_what is TrainOnWhat.ALL_ASSISTANT_MESSAGES


def test_chats_with_images_become_data_that_hold_as_many_positions_as_the_models_processor_says(tmp_path: Path) -> None:
    save(chatml(), tmp_path)
    qwen3_image_processor().save_pretrained(tmp_path)
    content = [image_part(Image.new("RGB", (200, 120))), {"type": "text", "text": "What is it?"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": content}, *chat("q", "a")[1:]]}) + "\n")
    config = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=str(tmp_path),
        renderer_name="qwen3_vl",
        batch_size=1,
        model_name_for_images=str(tmp_path),
    )
    dataset, _ = FromConversationFileBuilder(common_config=config, file_path=str(path))()
    [datum] = dataset.get_batch(0)
    [image] = [chunk for chunk in datum.model_input.chunks if isinstance(chunk, ImageChunk)]
    assert image.length == 6 * 4  # of 32 pixels each way
    assert len(targets(datum)) == len(weights(datum)) == datum.model_input.length
    assert sum(weights(datum)) == pytest.approx(1)
    with pytest.raises(InvalidRequest, match="image_processor"):
        replace(config, model_name_for_images=None).renderer()


def test_chats_of_several_files_come_in_their_shares(tmp_path: Path, config: ChatDatasetBuilderCommonConfig) -> None:
    paths = [tmp_path / name for name in ("many.jsonl", "few.jsonl")]
    for path, size in zip(paths, (12, 3), strict=True):
        path.write_text(
            "".join(json.dumps({"messages": chat("q", f"{path.stem} {index}")}) + "\n" for index in range(size))
        )
    files = (str(paths[0]), str(paths[1]))
    builder = InterleavedChatDatasetBuilder(
        common_config=config, file_paths=files, weights=(2.0, 1.0), num_chats=12, test_size=1
    )
    train, test = builder()
    assert test is not None
    tested = {tuple(targets(one)) for one in test.get_batch(0)}
    trained = [tuple(targets(one)) for index in range(len(train)) for one in train.get_batch(index)]
    assert len(trained) == 12
    assert len(tested) == 2
    assert not tested & set(trained)
    tokenizer = config.renderer().tokenizer
    answers = [tokenizer.decode([int(token) for token in one]) for one in trained]
    assert sum("few" in answer for answer in answers) == 4  # of two chats, each twice
    assert len({answer for answer in answers if "few" in answer}) == 2
