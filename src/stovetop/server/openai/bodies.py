"""The bodies of the OpenAI protocol, as values. A parameter that is not known, or that would change what is answered
and is not offered here, is refused by its name; those that could change nothing are passed over.

Null is what clients send for a parameter that was not given.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import from_json, to_json

from stovetop.errors import InvalidRequest
from stovetop.server.bodies import Body, FewStops, Id

MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_ALTERNATIVES = 20  # as OpenAI has it
ALSO_TOKENS = 16  # of a completion that says nothing of max_tokens, as OpenAI has it


class BadParameter(InvalidRequest):
    """A parameter that cannot be served as it is. `code` is what programs tell the reason by."""

    def __init__(self, param: str | None, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


# What changes nothing that is answered.
_PASSED_OVER = frozenset(
    ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user")
)

# What would change it and is not offered: the values at which it does nothing, and what to do instead.
_NOT_OFFERED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "audio": ((), "models here answer in text"),
    "best_of": ((1,), "pass n, and choose among the choices by their logprobs"),
    "frequency_penalty": ((0,), "tokens are drawn from the model's own distribution, so that their logprobs are its"),
    "function_call": (("auto",), "pass tool_choice"),
    "functions": (([],), "pass tools"),
    "guided_json": ((), "answers are not constrained to a form"),
    "ignore_eos": ((False,), "an answer ends where the model ends it"),
    "logit_bias": (({},), "tokens are drawn from the model's own distribution, so that their logprobs are its"),
    "min_p": ((0,), "pass top_p or top_k"),
    "modalities": ((["text"],), "models here answer in text"),
    "parallel_tool_calls": ((True,), "how many tools a model calls is not constrained"),
    "prediction": ((), "leave it out"),
    "presence_penalty": ((0,), "tokens are drawn from the model's own distribution, so that their logprobs are its"),
    "reasoning_effort": ((), "pass renderer_name, which says how the model is asked to think"),
    "repetition_penalty": ((1,), "tokens are drawn from the model's own distribution, so that their logprobs are its"),
    "response_format": (({"type": "text"},), "answers are not constrained to a form; ask for one in the messages"),
    "suffix": (("",), "text is only continued"),
    "verbosity": ((), "ask for it in the messages"),
    "web_search_options": ((), "nothing is searched here"),
}


class Asks(Body):
    """Unknown fields are refused here, as they would be passed over silently."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Asks):
    include_usage: bool = False
    include_obfuscation: bool = False  # pads events against listeners; there are none on this machine


class Sampled(Asks):
    """What both kinds have."""

    model: Id
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # not OpenAI's; -1 is off
    stop: Annotated[str | list[str], FewStops] = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stops(self) -> list[str]:
        """All stop strings."""
        return ([self.stop] if self.stop else []) if isinstance(self.stop, str) else self.stop


class Function(Asks):
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: dict[str, JsonValue] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: Literal[False] | None = None  # arguments are not constrained to their schema


class ToolAsked(Asks):
    type: Literal["function"]
    function: Function


class ChatAsked(Sampled):
    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # the older name of:
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # None: what the context leaves
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] = 0
    tools: list[ToolAsked] = Field(default_factory=list[ToolAsked])
    tool_choice: Literal["auto", "none"] = "auto"  # a call cannot be forced
    renderer_name: str | None = None  # not OpenAI's: the renderer of the chat, instead of the family's first one

    @model_validator(mode="after")
    def _fits(self) -> "ChatAsked":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are one limit; pass one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def limit(self) -> int | None:
        """How many tokens an answer may have."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # which one a model has, its tokenizer knows


class CompletionAsked(Sampled):
    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[str] | list[TokenId] | list[list[TokenId]], Field(min_length=1)]
    )  # one, or several; a list of numbers is one
    max_tokens: Annotated[int, Field(ge=0)] = ALSO_TOKENS
    echo: bool = False  # the prompt before each answer, and its logprobs before those
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None  # so many of the most probable besides

    @model_validator(mode="after")
    def _fits(self) -> "CompletionAsked":
        if not isinstance(self.prompt, str) and len(self.prompt) > MAX_PROMPTS and not isinstance(self.prompt[0], int):
            raise ValueError(f"there may be {MAX_PROMPTS} prompts in one request, and there are {len(self.prompt)}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens may be 0 only with echo=true, to score a prompt")
        return self


Of = TypeVar("Of", ChatAsked, CompletionAsked)


def read(kind: type[Of], data: bytes) -> Of:
    """Takes a moment for a long chat: not for an event loop."""
    try:
        sent = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise BadParameter(None, f"the body is no JSON: {error}") from None
    if not isinstance(sent, dict):
        raise BadParameter(None, "the body must be a JSON object")
    fields = cast("dict[str, Any]", sent)  # JSON has no other keys
    offered = {name: value for name, value in fields.items() if _is_offered(name, value, kind)}
    try:
        return kind.model_validate_json(to_json(offered))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        param = where.partition(".")[0] or None
        raise BadParameter(param, f"{where}: {said}" if where else said, "invalid_value") from None


def _is_offered(name: str, value: Any, kind: type[Of]) -> bool:
    """False of what does nothing."""
    if value is None or name in _PASSED_OVER:
        return False
    if name in kind.model_fields:
        return True
    if name in _NOT_OFFERED:
        neutral, instead = _NOT_OFFERED[name]
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
            return False
        raise BadParameter(name, f"{name} is not supported here: {instead}; leave it out", "unsupported_parameter")
    near = get_close_matches(name, kind.model_fields, 1, 0.6)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(sorted(kind.model_fields))
    raise BadParameter(name, f"unknown parameter {name[:80]!r}{meant} known: {known}", "unknown_parameter")
