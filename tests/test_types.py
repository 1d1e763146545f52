"""The values that go into and come out of the four verbs."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest
from stovetop.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ImageChunk,
    LoraConfig,
    ModelInput,
    SamplingParams,
    TensorData,
)

tokens = st.lists(st.integers(0, 2**31), max_size=20)
chunks = st.one_of(
    tokens.map(EncodedTextChunk),
    st.integers(0, 500).map(lambda count: ImageChunk(b"bytes", "png", expected_tokens=count)),
)


def test_a_model_input_grows_by_a_token_and_stays_the_value_it_was() -> None:
    short = ModelInput.from_ints([1, 2])
    assert short.append_int(3).to_ints() == [1, 2, 3]
    assert short.to_ints() == [1, 2]
    assert len(short.append_int(3).chunks) == 1


def test_an_empty_model_input_has_no_chunk_and_no_length() -> None:
    assert ModelInput.empty().length == 0
    assert ModelInput.from_ints([]) == ModelInput.empty()
    assert ModelInput.empty().append_int(7).to_ints() == [7]


def test_a_token_after_an_image_starts_a_new_text_chunk() -> None:
    image = ImageChunk(b"bytes", "jpeg", expected_tokens=10)
    grown = ModelInput.from_ints([1]).append(image).append_int(2)
    assert grown.chunks == (EncodedTextChunk([1]), image, EncodedTextChunk([2]))
    assert grown.length == 12


@given(st.lists(chunks, max_size=6))
def test_the_length_of_a_model_input_is_the_sum_of_its_chunks(parts: list[EncodedTextChunk | ImageChunk]) -> None:
    assert ModelInput(parts).length == sum(chunk.length for chunk in parts)


@given(tokens)
def test_ids_survive_a_model_input(ids: list[int]) -> None:
    assert ModelInput.from_ints(ids).to_ints() == ids
    assert ModelInput.from_ints(np.array(ids, dtype=np.int64)).to_ints() == ids


def test_to_ints_refuses_an_image_and_says_which_chunk_it_is() -> None:
    with pytest.raises(InvalidRequest, match="chunk 1 is an image"):
        ModelInput.from_ints([1]).append(ImageChunk(b"", "png", expected_tokens=1)).to_ints()


def test_an_image_without_expected_tokens_has_no_length() -> None:
    with pytest.raises(InvalidRequest, match="expected_tokens"):
        _ = ModelInput([ImageChunk(b"", "png")]).length


def test_a_token_id_is_never_rounded() -> None:
    with pytest.raises(InvalidRequest, match="integers"):
        EncodedTextChunk([1.5])


def test_a_chunk_gives_and_takes_tokens_and_checks_only_those_that_are_new() -> None:
    chunk = EncodedTextChunk([1, 2, 3])
    assert (chunk.first(2), chunk.first(-1)) == (EncodedTextChunk([1, 2]), EncodedTextChunk([1, 2]))
    assert chunk.followed_by(np.array([4])) == EncodedTextChunk([1, 2, 3, 4])
    assert pickle.loads(pickle.dumps(chunk.first(1))) == EncodedTextChunk([1])
    with pytest.raises(InvalidRequest, match="integers"):
        chunk.followed_by([1.5])


def test_token_ids_become_plain_integers() -> None:
    for tokens in (np.array([200, 100], np.uint8), [200, np.int64(100)], iter([200, 100])):
        assert [(type(token), token) for token in EncodedTextChunk(tokens).tokens] == [(int, 200), (int, 100)]


@pytest.mark.parametrize("tokens", [[1, 2.0], [1.0, 2], ["a"], [1, "a"], [1, None], [[1]]])
def test_what_is_no_integer_is_refused_wherever_it_stands(tokens: list[object]) -> None:
    with pytest.raises(InvalidRequest, match="token ids must be integers"):
        EncodedTextChunk(tokens)


# ---- tensors ---------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@given(shapes, st.sampled_from([np.int64, np.float32]))
def test_arrays_survive_a_tensor_bit_for_bit(shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    array = np.random.default_rng(0).normal(scale=1e6, size=shape).astype(dtype)
    tensor = TensorData.from_numpy(array)
    assert tensor.shape == list(shape)
    assert tensor.dtype == np.dtype(dtype).name
    assert tensor.to_numpy().tobytes() == array.tobytes()
    assert tensor.to_torch().numpy().tobytes() == array.tobytes()
    assert TensorData.from_torch(torch.from_numpy(array)) == tensor
    assert TensorData(tensor.data, tensor.dtype, tensor.shape) == tensor
    assert pickle.loads(pickle.dumps(tensor)) == tensor


def test_other_integers_and_floats_become_int64_and_float32() -> None:
    assert TensorData.from_numpy(np.array([1, 2], np.int16)).dtype == "int64"
    assert TensorData.from_numpy(np.array([0.5], np.float64)).dtype == "float32"
    assert TensorData.from_torch(torch.tensor([0.5], dtype=torch.bfloat16)).tolist() == [0.5]
    assert TensorData.from_torch(torch.tensor([1.5], requires_grad=True)).tolist() == [1.5]
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8):
        assert TensorData(torch.tensor([2], dtype=dtype), "int64").tolist() == [2]
    with pytest.raises(InvalidRequest, match="whole numbers"):
        TensorData(torch.tensor([2.0**60 + 0.5, 0.1], dtype=torch.float64), "int64")


def test_a_tensor_is_a_value_of_its_own() -> None:
    array = np.ones(3, np.float32)
    tensor = TensorData.from_numpy(array)
    array[0] = 9
    tensor.to_torch()[1] = 9
    assert tensor.tolist() == [1, 1, 1]
    for copied in (tensor, copy.copy(tensor), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        with pytest.raises(ValueError, match="read-only"):
            copied.to_numpy()[0] = 9


def test_an_adopted_array_is_not_copied_and_can_no_longer_be_written_to() -> None:
    array = np.ones(3, np.float32)
    tensor = TensorData.adopt(array)
    assert tensor == TensorData([1, 1, 1], "float32")
    assert np.shares_memory(tensor.array, array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    with pytest.raises(InvalidRequest, match="float64"):
        TensorData.adopt(np.ones(3))


def test_two_tensors_are_equal_when_dtype_shape_and_values_are() -> None:
    assert TensorData([1, 2], "int64") != TensorData([1, 2], "float32")
    assert TensorData([1, 2], "int64") != TensorData([1, 2], "int64", [2, 1])
    assert TensorData([float("nan")], "float32") == TensorData([float("nan")], "float32")


@pytest.mark.parametrize(
    ("data", "dtype", "shape", "words"),
    [
        ([1, 2, 3], "float32", [2, 2], r"3 values.*\(2, 2\)"),
        ([[1], [2, 3]], "float32", None, "rectangular"),
        (["a"], "float32", None, "numbers"),
        ([1.5], "int64", None, "1.5"),
        ([float("nan")], "int64", None, "nan"),
        ([2**63], "int64", None, "9223372036854775808"),
        ([1], "float64", None, "'float64'"),
    ],
)
def test_a_tensor_refuses_what_it_could_not_hold_unchanged(
    data: list[object], dtype: str, shape: list[int] | None, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        TensorData(data, dtype, shape)


@pytest.mark.parametrize("tensor", [torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"])
def test_a_torch_tensor_that_is_not_dense_or_holds_nothing_is_refused(tensor: torch.Tensor) -> None:
    for make in (TensorData.from_torch, lambda tensor: TensorData(tensor, "float32"), EncodedTextChunk):
        with pytest.raises(InvalidRequest, match="must be dense and hold its numbers"):
            make(tensor)


def test_a_tensor_of_booleans_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="bool"):
        TensorData.from_numpy(np.array([True]))


# ---- datums ----------------------------------------------------------------------------------------------------------


def test_a_datum_takes_tensors_arrays_and_lists_alike() -> None:
    weights = [0.0, 1.0, 0.5]
    forms = [weights, tuple(weights), np.array(weights), torch.tensor(weights), TensorData(weights, "float32")]
    first, *others = [
        Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": form}) for form in forms
    ]
    assert all(other == first for other in others)
    assert first.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert first.loss_fn_inputs["weights"].dtype == "float32"


def test_a_mask_of_whole_numbers_becomes_one_of_floats_and_other_arrays_keep_their_dtype() -> None:
    for mask in (np.array([0, 1]), torch.tensor([0, 1]), np.array([0, 1], np.uint8), [0, 1]):
        datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": mask, "of_mine": np.arange(2)})
        assert datum.loss_fn_inputs["weights"] == TensorData([0.0, 1.0], "float32")
        assert datum.loss_fn_inputs["of_mine"].dtype == "int64"


def test_a_list_takes_the_dtype_of_its_name() -> None:
    datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "advantages": [1], "my_own": [3]})
    assert {name: tensor.dtype for name, tensor in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "advantages": "float32",
        "my_own": "float32",
    }


def test_a_datum_survives_pickling() -> None:
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0.0, 1.0]})
    assert pickle.loads(pickle.dumps(datum)) == datum


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdamParams(learning_rate=-1e-4), "learning_rate.*-0.0001"),
        (lambda: AdamParams(learning_rate=float("nan")), "learning_rate.*nan"),
        (lambda: AdamParams(beta1=1.0), "beta1.*1.0"),
        (lambda: AdamParams(beta2=-0.1), "beta2.*-0.1"),
        (lambda: AdamParams(eps=0.0), "eps.*0.0"),
        (lambda: AdamParams(weight_decay=float("inf")), "weight_decay.*inf"),
        (lambda: AdamParams(grad_clip_norm=-1.0), "grad_clip_norm.*-1.0"),
        (lambda: LoraConfig(rank=0), "rank.*0"),
        (lambda: LoraConfig(alpha=0.0), "alpha.*0.0"),
        (lambda: LoraConfig(train_mlp=False, train_attn=False, train_unembed=False), "at least one"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens.*0"),
        (lambda: SamplingParams(temperature=-1.0), "temperature.*-1.0"),
        (lambda: SamplingParams(top_k=0), "top_k.*0"),
        (lambda: SamplingParams(top_p=0.0), "top_p.*0.0"),
        (lambda: SamplingParams(top_p=1.1), "top_p.*1.1"),
        (lambda: SamplingParams(seed=-1), "seed.*-1"),
        (lambda: SamplingParams(stop=["a", 1]), "stop.*not both.*'a', 1"),
        (lambda: SamplingParams(stop=""), "stop.*not empty.*''"),
        (lambda: SamplingParams(stop=["a", ""]), r"stop\[1\].*not empty.*''"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name_and_value(make: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make()


@pytest.mark.parametrize("stop", [None, "END", ["END", "\n"], [3, 4], []])
def test_every_form_of_stop_is_taken(stop: object) -> None:
    assert SamplingParams(stop=stop).stop == stop


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert AdamParams() == AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
    assert SamplingParams() == SamplingParams(None, None, None, 1.0, -1, 1.0)
