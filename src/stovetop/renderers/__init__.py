"""Renderers by name. Each is one file beside this one; what they have in common is in `base`."""

import importlib
from collections.abc import Callable

from stovetop.client import Tokenizer
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers.base import Renderer
from stovetop.renderers.role_colon import RoleColonRenderer
from stovetop.renderers.template import ChatTemplateRenderer

ImageProcessor = object  # of transformers; the renderers of families that see images say what they need of it
RendererFactory = Callable[[Tokenizer, ImageProcessor | None], Renderer]

_FACTORIES: dict[str, RendererFactory] = {
    "chat_template": lambda tokenizer, image_processor: ChatTemplateRenderer(tokenizer),
    "role_colon": lambda tokenizer, image_processor: RoleColonRenderer(tokenizer),
}


def supported_renderers() -> list[str]:
    return sorted(_FACTORIES)


def get_renderer(
    name: str | RendererFactory, tokenizer: Tokenizer, image_processor: ImageProcessor | None = None
) -> Renderer:
    """A renderer by its name, by `package.module:Name` of a factory of your own, or by that factory itself."""
    if not isinstance(name, str):
        return name(tokenizer, image_processor)
    if name in _FACTORIES:
        return _FACTORIES[name](tokenizer, image_processor)
    if ":" in name:
        return _imported(name)(tokenizer, image_processor)
    raise UnknownName("renderer", name, _FACTORIES, hint="A renderer of your own is named package.module:Name")


def _imported(path: str) -> RendererFactory:
    module, _, name = path.partition(":")
    try:
        return vars(importlib.import_module(module))[name]
    except (ImportError, KeyError) as error:
        raise InvalidRequest(f"renderer {path!r} cannot be imported: {error!r}") from error
