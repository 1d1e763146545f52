"""Images in chats: from wherever they are to RGB, to the bytes that a model input carries, and to the number of tokens
they take, which the model's own image processor tells. Where in a turn an image stands is the family's business.
"""

import base64
import binascii
import io
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast, runtime_checkable

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.hub import asking
from stovetop.model_store import find_model, known_models
from stovetop.renderers.messages import ImagePart
from stovetop.types import ImageChunk

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageSource = str | Path | bytes | Image  # a string is a data: URI or the path of a file

_FORMATS: dict[str, Literal["png", "jpeg"]] = {"PNG": "png", "JPEG": "jpeg"}
_ORIENTATION = 0x0112  # the EXIF tag that says how a camera was held


@runtime_checkable
class ImageProcessor(Protocol):
    """What the package asks of an image processor: the part of the transformers interface that it uses."""

    @property
    def merge_size(self) -> int:
        """So many patches by so many become one token."""
        ...

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, object]) -> int:
        """Of an image of this size in pixels, once it is resized as the model wants it."""
        ...


def get_image_processor(name: str) -> ImageProcessor:
    """The image processor of a model given by folder, by the name or alias of a fetched model, or by its id on the
    hub."""
    from transformers import AutoImageProcessor

    location = str(find_model(name) or name)
    with asking(unless_here=location) as problem:
        try:
            return cast(ImageProcessor, AutoImageProcessor.from_pretrained(location))  # pyright: ignore[reportUnknownMemberType]  untyped
        except (OSError, ValueError) as error:
            said = problem or f"{type(error).__name__}: {str(error).splitlines()[0]}"
            hint = f"Pass the folder of a model that sees images ({said})"
            raise UnknownName("image processor", location, known_models(), hint=hint) from error


def require_image_processor(image_processor: object, renderer: str) -> ImageProcessor:
    """The image processor, if it is one."""
    if isinstance(image_processor, ImageProcessor):
        return image_processor
    raise InvalidRequest(
        f"renderer {renderer!r} counts the tokens of images with the model's image processor: pass "
        "image_processor=get_image_processor(model_name), or the image_processor of a whole processor; got "
        f"image_processor={image_processor!r:.80}"
    )


def image_part(source: "ImageSource") -> ImagePart:
    """A part of a message that holds the image itself, so that it can be written down and sent."""
    picture = _picture(source)
    uri = f"data:image/{picture.format};base64,{base64.b64encode(picture.data).decode()}"
    return ImagePart(type="image", image=uri)


def image_chunk(source: "ImageSource", image_processor: ImageProcessor) -> ImageChunk:
    """The image as a model input carries it. PNG and JPEG files of RGB pixels go as they are; others become PNG."""
    picture = _picture(source)
    try:
        num_patches = image_processor.get_number_of_image_patches(picture.height, picture.width, {})
    except ValueError as error:
        size = f"{picture.width}x{picture.height}"
        raise InvalidRequest(f"the image processor refuses an image of {size} pixels: {error}") from error
    return ImageChunk(picture.data, picture.format, expected_tokens=num_patches // image_processor.merge_size**2)


class _Picture(NamedTuple):
    data: bytes
    format: Literal["png", "jpeg"]
    width: int
    height: int


def _picture(source: "ImageSource") -> _Picture:
    from PIL import ImageOps

    data = _bytes(source) if isinstance(source, str | Path | bytes) else b""
    image = source if not isinstance(source, str | Path | bytes) else _decoded(data, source)
    image_format = _FORMATS.get(image.format or "")
    turned = image.getexif().get(_ORIENTATION, 1) != 1
    if not data or image_format is None or image.mode != "RGB" or turned:
        image = ImageOps.exif_transpose(image).convert("RGB")
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        data, image_format = buffer.getvalue(), "png"
    return _Picture(data, image_format, image.width, image.height)


def _decoded(data: bytes, source: str | Path | bytes) -> "Image":
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"an image cannot be read ({type(error).__name__}: {error}): {_shown(source)}") from error
    return image


def _bytes(source: str | Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and source.startswith("data:"):
        return _bytes_of_uri(source)
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"an image is a data: URI or a file; download it first, and pass image_part(its bytes): {source[:80]!r}"
        )
    try:
        return Path(source).read_bytes()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"an image file cannot be read ({error}): {_shown(source)}") from error


def _bytes_of_uri(uri: str) -> bytes:
    header, _, data = uri.partition(",")
    try:
        if not header.endswith(";base64"):
            raise binascii.Error("it does not say ';base64,'")
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise InvalidRequest(f"a data: URI of an image must be in base64 ({error}): {uri[:40]!r}") from error


def _shown(source: str | Path | bytes) -> str:
    return f"{len(source)} bytes" if isinstance(source, bytes) else repr(source)[:80]
