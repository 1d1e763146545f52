"""Renderers by name. Each is one file beside this one; what they have in common is in `base`."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers import qwen3
from stovetop.renderers.base import Renderer
from stovetop.renderers.deepseek_v3 import DeepSeekV3Renderer
from stovetop.renderers.gpt_oss import GptOssRenderer, ReasoningEffort
from stovetop.renderers.images import ImageProcessor
from stovetop.renderers.kimi_k2 import KimiK2Renderer
from stovetop.renderers.llama3 import Llama3Renderer
from stovetop.renderers.qwen3 import Qwen3Renderer
from stovetop.renderers.role_colon import RoleColonRenderer
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.tokenizing import Tokenizer

RendererFactory = Callable[..., Renderer]  # of a tokenizer, an image processor or None, and options by name


def _role_colon(tokenizer: Tokenizer, image_processor: ImageProcessor | None) -> Renderer:
    return RoleColonRenderer(tokenizer)


def _chat_template(tokenizer: Tokenizer, image_processor: ImageProcessor | None, **options: object) -> Renderer:
    return ChatTemplateRenderer(tokenizer, options)


def _llama3(tokenizer: Tokenizer, image_processor: ImageProcessor | None, date: str | None = None) -> Renderer:
    return Llama3Renderer(tokenizer, date)


def _deepseek_v3(
    tokenizer: Tokenizer, image_processor: ImageProcessor | None, system_role_as_user: bool = False
) -> Renderer:
    return DeepSeekV3Renderer(tokenizer, system_role_as_user)


def _kimi_k2(tokenizer: Tokenizer, image_processor: ImageProcessor | None) -> Renderer:
    return KimiK2Renderer(tokenizer)


def _gpt_oss(effort: ReasoningEffort) -> RendererFactory:
    def make(
        tokenizer: Tokenizer,
        image_processor: ImageProcessor | None,
        date: str | None = None,
        current_date: str | None = None,  # the same, by the name that the template's own line has
    ) -> Renderer:
        if date is not None and current_date is not None:
            raise InvalidRequest(f"date and current_date are one option; pass one: {date!r}, {current_date!r}")
        return GptOssRenderer(tokenizer, effort, date if current_date is None else current_date)

    return make


def _gpt_oss_no_sysprompt(tokenizer: Tokenizer, image_processor: ImageProcessor | None) -> Renderer:
    return GptOssRenderer(tokenizer)


_FACTORIES: dict[str, RendererFactory] = {
    "chat_template": _chat_template,
    "deepseekv3": _deepseek_v3,
    "deepseekv3_disable_thinking": _deepseek_v3,
    "gpt_oss_high_reasoning": _gpt_oss("high"),
    "gpt_oss_low_reasoning": _gpt_oss("low"),
    "gpt_oss_medium_reasoning": _gpt_oss("medium"),
    "gpt_oss_no_sysprompt": _gpt_oss_no_sysprompt,
    "kimi_k2": _kimi_k2,
    "llama3": _llama3,
    "qwen3": partial(Qwen3Renderer, qwen3.QWEN3),
    "qwen3_disable_thinking": partial(Qwen3Renderer, qwen3.QWEN3_DISABLE_THINKING),
    "qwen3_instruct": partial(Qwen3Renderer, qwen3.QWEN3_INSTRUCT),
    "qwen3_vl": partial(Qwen3Renderer, qwen3.QWEN3_VL),
    "qwen3_vl_instruct": partial(Qwen3Renderer, qwen3.QWEN3_VL_INSTRUCT),
    "role_colon": _role_colon,
}


_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def supported_renderers() -> list[str]:
    """The names that `get_renderer` knows, in alphabetical order."""
    return sorted(_FACTORIES)


def get_renderer(
    name: str | RendererFactory,
    tokenizer: Tokenizer,
    image_processor: ImageProcessor | None = None,
    **options: object,
) -> Renderer:
    """A renderer by its name, by `package.module:Name` of a factory or class of your own, or by that itself. It is
    called with the tokenizer; with the image processor, if it has a second parameter that is required or named
    image_processor; and with the options. Which there are, the family's file says.

        get_renderer("gpt_oss_high_reasoning", tokenizer, current_date="2025-08-05")
        get_renderer("my_package.renderers:MyRenderer", tokenizer)
    """
    if isinstance(name, str) and name not in _FACTORIES and ":" not in name:
        raise UnknownName("renderer", name, _FACTORIES, hint="A renderer of your own is named package.module:Name")
    factory = name if not isinstance(name, str) else _FACTORIES[name] if name in _FACTORIES else _imported(name)
    parameters = list(inspect.signature(factory).parameters.values())[1:]
    takes_images = any(
        second.name == "image_processor" or (second.kind in _BY_POSITION and second.default is second.empty)
        for second in parameters[:1]
    )
    _check_options(str(name), parameters[1:] if takes_images else parameters, options)
    return factory(tokenizer, *([image_processor] if takes_images else []), **options)


def _check_options(name: str, known: Sequence[inspect.Parameter], options: Mapping[str, object]) -> None:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
        return
    for option in options:
        if option not in [parameter.name for parameter in known]:
            raise UnknownName(f"option of renderer {name!r}", option, [parameter.name for parameter in known])


def _imported(path: str) -> RendererFactory:
    module, _, name = path.partition(":")
    try:
        return vars(importlib.import_module(module))[name]
    except (ImportError, KeyError) as error:
        raise InvalidRequest(f"renderer {path!r} cannot be imported: {error!r}") from error
