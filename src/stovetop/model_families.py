"""What is known of models by their name: who made them, how large they are, which renderers speak their language, where
their tokenizer comes from. One row for each kind of model of a family; nothing here loads anything.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from stovetop.client import ServiceClient, TrainingClient
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.tokenizing import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelAttributes:
    """Of one model. A base model, which knows no chats, is spoken to in plain text."""

    organization: str
    version: str  # of the family: "3.1", "K2"
    size: str  # as the name has it, "30B-A3B"; empty where it has none
    is_chat: bool
    is_vl: bool  # sees images
    recommended_renderers: tuple[str, ...]  # names; the first fits best


class TokenizerSource(NamedTuple):
    """What of the hub to load a tokenizer from."""

    repository: str
    revision: str | None = None
    runs_code: bool = False  # the repository brings the tokenizer's own code


class _Kind(NamedTuple):
    """One row: models whose name matches. The pattern may have the groups `version` and `size`."""

    pattern: str
    example: str
    renderers: tuple[str, ...]
    version: str = ""
    is_vl: bool = False


_BASE = ("role_colon",)
_TEMPLATE = ("chat_template",)
_GPT_OSS = tuple(f"gpt_oss_{kind}" for kind in ("no_sysprompt", "medium_reasoning", "low_reasoning", "high_reasoning"))
_SIZE = r"(?P<size>[\d.]+[BM](?:-A[\d.]+B)?)"
_LLAMA = rf"meta-llama/(?:Meta-)?Llama-(?P<version>3(?:\.[123])?)-{_SIZE}"
_QWEN_VL = r"(?P<version>3\.[568])"
_NEMOTRON = r"nvidia/NVIDIA-Nemotron-(?P<version>3(?:\.5)?)-(?:Nano|Super|Ultra|Lightning)"

# Models of these families that are not here (vision, coding, reasoning-only variants) write chats in other ways than
# their siblings: they are served by their own template. So are those that are older than thinking: the renderers of
# DeepSeek and Kimi write its tags, which these have not learned.
_KINDS = (
    _Kind(rf"{_LLAMA}-Instruct", "meta-llama/Llama-3.1-8B-Instruct", ("llama3",)),
    _Kind(_LLAMA, "meta-llama/Llama-3.2-1B", _BASE),
    _Kind(rf"Qwen/Qwen3-VL-{_SIZE}-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct", ("qwen3_vl_instruct",), "3", True),
    _Kind(rf"Qwen/Qwen3-VL-{_SIZE}-Thinking", "Qwen/Qwen3-VL-8B-Thinking", ("qwen3_vl",), "3", True),
    _Kind(rf"Qwen/Qwen3-{_SIZE}-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507", ("qwen3_instruct",), "3"),
    _Kind(rf"Qwen/Qwen3-{_SIZE}-Base", "Qwen/Qwen3-8B-Base", _BASE, "3"),
    _Kind(rf"Qwen/Qwen3-{_SIZE}", "Qwen/Qwen3-8B", ("qwen3", "qwen3_disable_thinking"), "3"),
    _Kind(rf"Qwen/Qwen{_QWEN_VL}-{_SIZE}-Base", "Qwen/Qwen3.5-9B-Base", _BASE, is_vl=True),
    _Kind(rf"Qwen/Qwen{_QWEN_VL}-{_SIZE}", "Qwen/Qwen3.5-9B", _TEMPLATE, is_vl=True),
    _Kind(rf"{_NEMOTRON}-VL-{_SIZE}-BF16", "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16", _TEMPLATE, is_vl=True),
    _Kind(rf"{_NEMOTRON}-{_SIZE}-BF16", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", _TEMPLATE),
    _Kind(r"deepseek-ai/DeepSeek-V(?P<version>3(?:\.1)?)-Base", "deepseek-ai/DeepSeek-V3.1-Base", _BASE),
    _Kind(
        r"deepseek-ai/DeepSeek-V(?P<version>3\.1)(?:-Terminus)?",
        "deepseek-ai/DeepSeek-V3.1",
        ("deepseekv3_disable_thinking", "deepseekv3"),
    ),
    _Kind(r"deepseek-ai/DeepSeek-V3(?:-0324)?", "deepseek-ai/DeepSeek-V3", _TEMPLATE, "3"),
    _Kind(r"moonshotai/Kimi-K2-Base", "moonshotai/Kimi-K2-Base", _BASE, "K2"),
    _Kind(r"moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K2-Thinking", ("kimi_k2",), "K2"),
    _Kind(r"moonshotai/Kimi-K2-Instruct(?:-0905)?", "moonshotai/Kimi-K2-Instruct", _TEMPLATE, "K2"),
    _Kind(rf"openai/gpt-oss-{_SIZE.replace('[BM]', 'b')}", "openai/gpt-oss-20b", _GPT_OSS, "oss"),
)


def get_model_attributes(model_name: str) -> ModelAttributes:
    """Of a model by its name on the hub. A folder whose last two parts are that name will do."""
    attributes = _find(model_name)
    if attributes is None:
        examples = [kind.example for kind in _KINDS]
        raise UnknownName(
            "model", model_name, examples, hint="These stand for their families. Any other model names its renderer"
        )
    return attributes


def recommended_renderer_name(tokenizer: Tokenizer, model_name: str | None = None) -> str:
    """The renderer of the model's family; for any other model its own chat template. A tokenizer without one, of a
    model that is not named, is taken for a base model's, which is spoken to in plain text."""
    attributes = None if model_name is None else _find(model_name)
    if attributes is not None:
        return attributes.recommended_renderers[0]
    if tokenizer.chat_template is not None:
        return "chat_template"
    if model_name is None:
        return "role_colon"
    raise InvalidRequest(
        "nothing is known of how this model writes chats: its family is not in the table and its tokenizer has no chat "
        "template. Pass renderer_name: role_colon for a base model, the name of a family that writes alike, or "
        f"package.module:Name of a renderer of your own. The model: {model_name!r}"
    )


def tokenizer_source(model_name: str) -> TokenizerSource:
    """Where a model's tokenizer is loaded from. Llama's own repositories ask for a sign-up first, so its tokenizer
    comes from an open copy; Kimi's runs code of its repository, of a revision that was read."""
    if re.match(r"meta-llama/(Meta-)?Llama-3", model_name):
        return TokenizerSource("thinkingmachineslabinc/meta-llama-3-instruct-tokenizer")
    if model_name == "moonshotai/Kimi-K2-Thinking":
        return TokenizerSource(model_name, "612681931a8c906ddb349f8ad0f582cb552189cd", runs_code=True)
    return TokenizerSource(model_name)


def _find(model_name: str) -> ModelAttributes | None:
    name = "/".join(model_name.rstrip("/").split("/")[-2:])
    for kind in _KINDS:
        found = re.fullmatch(kind.pattern, name)
        if found is not None:
            parts = found.groupdict(default="")
            return ModelAttributes(
                organization=name.partition("/")[0],
                version=parts.get("version", "") or kind.version,
                size=parts.get("size", ""),
                is_chat=kind.renderers != _BASE,
                is_vl=kind.is_vl,
                recommended_renderers=kind.renderers,
            )
    return None


def context_length(service: ServiceClient, trainer: TrainingClient) -> int | None:
    """Tokens that the model of this client can read at once; None where the service does not say."""
    return context_length_of(service, trainer.get_info().model_name)


def context_length_of(service: ServiceClient, model_name: str | None) -> int | None:
    """The same, of a model by its name; None where that is not known either."""
    models = service.get_server_capabilities().supported_models
    return next((model.max_context_length for model in models if model.model_name == model_name), None)
