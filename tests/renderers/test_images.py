import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from renderers.families import qwen3_image_processor
from renderers.real_tokenizers import qwen3
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers import get_renderer
from stovetop.renderers.base import Renderer
from stovetop.renderers.images import get_image_processor, image_chunk, image_part
from stovetop.renderers.messages import Message, TextPart
from stovetop.supervised.data import datum_from_model_input_weights
from stovetop.types import EncodedTextChunk, ImageChunk

PROCESSOR = qwen3_image_processor()


def picture(width: int = 200, height: int = 120, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def encoded(image: Image.Image, image_format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


class ThirtySixPatches:
    merge_size = 3

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, object]) -> int:
        return 36


@pytest.fixture
def renderer() -> Renderer:
    return get_renderer("qwen3_vl", qwen3(), PROCESSOR)


def test_an_image_comes_from_anywhere(tmp_path: Path) -> None:
    data = encoded(picture())
    (tmp_path / "a.png").write_bytes(data)
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    for source in (data, tmp_path / "a.png", str(tmp_path / "a.png"), uri):
        assert image_chunk(source, PROCESSOR).data == data
        assert image_part(source) == {"type": "image", "image": uri}
    pixels = np.asarray(Image.open(io.BytesIO(image_chunk(picture(), PROCESSOR).data)))
    assert (pixels == np.asarray(picture())).all()


def test_a_jpeg_is_sent_as_it_is_and_what_is_not_rgb_becomes_a_png() -> None:
    jpeg = encoded(picture(), "JPEG")
    assert image_chunk(jpeg, PROCESSOR).data == jpeg
    assert image_chunk(jpeg, PROCESSOR).format == "jpeg"
    for mode in ("RGBA", "L", "1"):
        chunk = image_chunk(encoded(picture(mode=mode)), PROCESSOR)
        assert chunk.format == "png"
        assert Image.open(io.BytesIO(chunk.data)).mode == "RGB"


def test_a_photograph_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    chunk = image_chunk(encoded(picture(200, 120), "JPEG", exif=exif), PROCESSOR)
    assert Image.open(io.BytesIO(chunk.data)).size == (120, 200)


def test_the_processor_tells_how_many_tokens_an_image_takes() -> None:
    assert image_chunk(picture(), ThirtySixPatches()).length == 36 // 3**2
    for size in ((200, 120), (1, 1), (3000, 40), (2000, 1500)):
        image = picture(*size)
        [grid] = PROCESSOR(images=[image])["image_grid_thw"]  # pyright: ignore[reportCallIssue]  what the model is fed
        assert image_chunk(image, PROCESSOR).length == int(np.prod(grid)) // PROCESSOR.merge_size**2


def test_the_placeholders_of_a_chat_are_as_many_as_the_processors(renderer: Renderer) -> None:
    images = [picture(200, 120), picture(64, 64)]
    chat = [
        Message(role="user", content=[image_part(images[0]), TextPart(type="text", text="and"), image_part(images[1])]),
        Message(role="assistant", content="two"),
    ]
    example = renderer.build_supervised_example(chat)
    text, first, between, second, after = example.model_input.chunks
    tokenizer = qwen3()
    assert [
        tokenizer.decode(chunk.tokens) for chunk in (text, between, after) if isinstance(chunk, EncodedTextChunk)
    ] == [
        "<|im_start|>user\n<|vision_start|>",
        "<|vision_end|>and<|vision_start|>",
        "<|vision_end|><|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n",
    ]
    grids = PROCESSOR(images=images)["image_grid_thw"]  # pyright: ignore[reportCallIssue]
    counts = [int(np.prod(grid)) // PROCESSOR.merge_size**2 for grid in grids]
    assert [first.length, second.length] == counts
    assert len(example.weights) == example.model_input.length
    assert example.weights[: -after.length].sum() == 0
    prompt = renderer.build_generation_prompt(chat[:1])
    assert prompt.chunks[:4] == example.model_input.chunks[:4]


def test_the_result_of_a_tool_may_be_an_image(renderer: Renderer) -> None:
    chat = [Message(role="user", content="look"), Message(role="tool", content=[image_part(picture())])]
    before, _, after = renderer.build_generation_prompt(chat).chunks
    assert isinstance(before, EncodedTextChunk)
    assert isinstance(after, EncodedTextChunk)
    assert qwen3().decode(before.tokens).endswith("<|im_start|>user\n<tool_response>\n<|vision_start|>")
    assert qwen3().decode(after.tokens).startswith("<|vision_end|>\n</tool_response><|im_end|>")


def test_truncation_never_cuts_an_image(renderer: Renderer) -> None:
    chat = [
        Message(role="user", content="q"),
        Message(role="assistant", content="a"),
        Message(role="user", content=[image_part(picture())]),
        Message(role="assistant", content="b"),
    ]
    example = renderer.build_supervised_example(chat, "all_assistant_messages")  # pyright: ignore[reportArgumentType]
    [start] = [index for index, chunk in enumerate(example.model_input.chunks) if isinstance(chunk, ImageChunk)]
    before = sum(chunk.length for chunk in example.model_input.chunks[:start])
    whole = example.model_input.length
    for max_length in range(before - 2, whole + 1):
        datum = datum_from_model_input_weights(example.model_input, example.weights, max_length)
        assert datum.model_input.length <= max_length
        images = [chunk for chunk in datum.model_input.chunks if isinstance(chunk, ImageChunk)]
        assert all(image == example.model_input.chunks[start] for image in images)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_instruct"])
def test_a_missing_image_processor_is_named(name: str) -> None:
    for wrong in (None, object()):
        with pytest.raises(InvalidRequest, match=f"'{name}' .* image_processor=get_image_processor"):
            get_renderer(name, qwen3(), wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"no image", "cannot be read"),
        (encoded(picture())[:300], "cannot be read"),
        ("data:image/png;base64,%%%", "must be in base64"),
        ("data:image/png,abc", "must be in base64"),
        ("nowhere.png", "file cannot be read"),
        ("https://example.org/a.png", "download it first"),
        (picture(3000, 2), "refuses an image of 3000x2"),
    ],
)
def test_a_broken_image_is_refused_by_name(source: bytes | str | Image.Image, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        image_chunk(source, PROCESSOR)


def test_a_text_model_and_an_assistant_have_no_place_for_an_image(renderer: Renderer) -> None:
    image = image_part(picture())
    with pytest.raises(InvalidRequest, match=r"qwen3, message 0 \(user\): only text"):
        get_renderer("qwen3", qwen3(), PROCESSOR).build_generation_prompt([Message(role="user", content=[image])])
    with pytest.raises(InvalidRequest, match=r"message 0 \(assistant\): only thinking, text"):
        renderer.build_generation_prompt([Message(role="assistant", content=[image])])


def test_the_image_processor_of_a_model_is_found_by_its_folder(tmp_path: Path) -> None:
    PROCESSOR.save_pretrained(tmp_path)  # pyright: ignore[reportAttributeAccessIssue]  of transformers
    loaded = get_image_processor(str(tmp_path))
    assert image_chunk(picture(), loaded) == image_chunk(picture(), PROCESSOR)
    with pytest.raises(UnknownName, match="unknown image processor"):
        get_image_processor(str(tmp_path / "nothing"))
