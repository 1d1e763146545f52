import pytest

from renderers.languages import chatml
from stovetop.backends.byte_tokenizer import ByteTokenizer
from stovetop.client import Tokenizer
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers import ImageProcessor, get_renderer, supported_renderers
from stovetop.renderers.role_colon import RoleColonRenderer
from stovetop.renderers.template import ChatTemplateRenderer


def make_own(tokenizer: Tokenizer, image_processor: ImageProcessor | None) -> RoleColonRenderer:
    return RoleColonRenderer(tokenizer)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), chatml()], ids=["bytes", "chatml"])
@pytest.mark.parametrize("name", supported_renderers())
def test_every_name_makes_a_renderer(name: str, tokenizer: Tokenizer) -> None:
    assert get_renderer(name, tokenizer).tokenizer is tokenizer


def test_the_names_are_these() -> None:
    assert supported_renderers() == ["chat_template", "role_colon"]


def test_a_renderer_of_ones_own_is_an_object_or_a_path_to_one() -> None:
    assert isinstance(get_renderer(make_own, ByteTokenizer()), RoleColonRenderer)
    assert isinstance(get_renderer(f"{__name__}:make_own", ByteTokenizer()), RoleColonRenderer)
    with_options = get_renderer(lambda tokenizer, _: ChatTemplateRenderer(tokenizer, {"x": 1}), ByteTokenizer())
    assert isinstance(with_options, ChatTemplateRenderer)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'chat_template'"):
        get_renderer("chat_tmplate", ByteTokenizer())


@pytest.mark.parametrize("path", ["no_such_module:x", "stovetop.renderers:no_such_name"])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be imported"):
        get_renderer(path, ByteTokenizer())
