"""From what is asked to tokens: chats by the renderer of the model's family, texts by its tokenizer, tools as the
family tells its models of them.

A model that is spoken to by its own chat template is not told of tools, because no one knows how it writes calls: a
renderer that does is named by `renderer_name`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.model_families import recommended_renderer_name
from stovetop.renderers import get_renderer, supported_renderers
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, ToolSpec, ensure_list, get_text_content, messages_from_json
from stovetop.server.openai.bodies import BadParameter, ChatAsked, CompletionAsked, ToolAsked
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput

MAX_CHARACTERS = 128  # of a text for each token of the context: no text of that length fits, and none is encoded


def require_short(param: str, num_characters: int, context_length: int | None) -> None:
    """Refuses a text that is far too long before it is encoded, which takes a second for each few megabytes."""
    if context_length is not None and num_characters > MAX_CHARACTERS * context_length:
        raise BadParameter(
            param,
            f"{param}: {num_characters} characters are too long for a context of {context_length} tokens, for which "
            f"{MAX_CHARACTERS * context_length} are encoded at most",
            "context_length_exceeded",
        )


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """A chat as the model reads it, and who reads its answer."""

    renderer: Renderer
    renderer_name: str
    tokens: ModelInput


def chat_prompt(asked: ChatAsked, tokenizer: Tokenizer, base_model: str) -> ChatPrompt:
    """Refuses what the family has no words for."""
    name = _renderer_name(asked, tokenizer, base_model)
    try:
        renderer = get_renderer(name, tokenizer)
    except InvalidRequest as error:
        raise BadParameter("renderer_name", str(error)) from error
    try:
        messages = messages_from_json(asked.messages, "messages")
    except InvalidRequest as error:
        raise BadParameter("messages", str(error)) from error
    _require_no_paths(messages)
    if asked.tools and asked.tool_choice != "none":
        messages = _with_tools(messages, asked.tools, renderer, name)
    try:
        return ChatPrompt(renderer, name, renderer.build_generation_prompt(messages))
    except InvalidRequest as error:
        raise BadParameter("messages", str(error)) from error


def _renderer_name(asked: ChatAsked, tokenizer: Tokenizer, base_model: str) -> str:
    if asked.renderer_name is None:
        try:
            return recommended_renderer_name(tokenizer, base_model)
        except InvalidRequest as error:
            raise BadParameter("renderer_name", str(error)) from error
    known = supported_renderers()  # no code of the caller's choice is imported
    if asked.renderer_name not in known:
        raise BadParameter("renderer_name", str(UnknownName("renderer", asked.renderer_name, known)))
    return asked.renderer_name


def _require_no_paths(messages: Sequence[Message]) -> None:
    """A chat of this machine may name the file of an image; one that comes from elsewhere may not."""
    for index, message in enumerate(messages):
        for part in ensure_list(message["content"]):
            if part["type"] == "image" and not part["image"].startswith("data:"):
                raise BadParameter("messages", f"messages, message {index}: an image must be a data: URI")


def _with_tools(messages: list[Message], tools: Sequence[ToolAsked], renderer: Renderer, name: str) -> list[Message]:
    """The chat behind what tells the model of its tools, which its first system message is part of."""
    specs = [ToolSpec(tool.function.name, tool.function.description, tool.function.parameters) for tool in tools]
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = get_text_content(messages[0]) if has_system else ""
    if name == "chat_template":
        raise BadParameter(
            "tools",
            "how this model writes tool calls is not known: it is spoken to by its chat template; pass renderer_name, "
            "that of a family that writes them alike, such as qwen3_instruct",
        )
    try:
        prefix = renderer.create_conversation_prefix_with_tools(specs, system)
    except InvalidRequest as error:
        raise BadParameter("tools", str(error)) from error
    return [*prefix, *messages[1 if has_system else 0 :]]


@dataclass(frozen=True, slots=True, eq=False)
class TextPrompt:
    """What is to be continued, as it was sent and as the model reads it."""

    text: str
    tokens: ModelInput


def completion_prompts(asked: CompletionAsked, tokenizer: Tokenizer, context_length: int | None) -> list[TextPrompt]:
    """One for each text, or list of token ids, that is to be continued. A text gets what the tokenizer puts before it,
    and names of control tokens in it are these tokens."""
    prompts: list[TextPrompt] = []
    try:
        for each in _several(asked.prompt):
            if isinstance(each, str):
                require_short("prompt", len(each), context_length)
                prompts.append(TextPrompt(each, ModelInput.from_ints(tokenizer.encode(each))))
            else:
                tokens = ModelInput.from_ints(each)
                prompts.append(TextPrompt(tokenizer.decode(each), tokens))
    except InvalidRequest as error:
        raise BadParameter("prompt", str(error)) from error
    if not all(prompt.tokens.length for prompt in prompts):
        raise BadParameter("prompt", "prompt: there must be a token to go on from, and one is empty")
    return prompts


def _several(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    tokens = [each for each in prompt if isinstance(each, int)]
    return [tokens] if tokens else cast("list[str] | list[list[int]]", prompt)  # of one kind, as the body has it
