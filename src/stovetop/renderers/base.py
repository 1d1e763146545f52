"""What a renderer is, and the pure functions that every renderer is made of: which messages are trained on, how
rendered text becomes tokens and weights, how sampled tokens become a message. How a family writes its turns is in
its file.

A renderer owns four things of a family: the prompt, the loss mask, the stop condition, the parser.

Shape suffixes: `N` tokens of one example.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import chain, islice
from typing import NamedTuple, Protocol, TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from stovetop.errors import InvalidRequest, NothingToTrain, UnknownName
from stovetop.renderers.messages import Message, Role, ToolSpec, check_messages, get_thinking
from stovetop.renderers.streaming import MessageDelta, StreamingMessageHeader
from stovetop.tokenizer import SafeEncoder, TokenizerName, get_tokenizer
from stovetop.tokenizing import Tokenizer
from stovetop.types import EncodedTextChunk, ImageChunk, ModelInput, ModelInputChunk

Made = TypeVar("Made")
Pieces = tuple[str | ImageChunk, ...]  # of a rendered chat; text is as `SafeEncoder.protect` left it


class TrainOnWhat(StrEnum):
    """Which tokens of a chat get weight 1. The *output* of a message is what its author wrote and what ends the turn;
    its *header*, which says who speaks, is trained by ALL_TOKENS alone."""

    LAST_ASSISTANT_MESSAGE = "last_assistant_message"  # the output of the last message, which must be the assistant's
    LAST_ASSISTANT_TURN = "last_assistant_turn"  # outputs of all assistant messages after the last user message
    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"  # outputs of every assistant message
    ALL_MESSAGES = "all_messages"  # outputs of every message
    ALL_TOKENS = "all_tokens"  # everything but a begin-of-text token
    ALL_USER_AND_SYSTEM_MESSAGES = "all_user_and_system_messages"  # outputs of those
    CUSTOMIZED = "customized"  # outputs of messages with trainable=True; every message must say

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise UnknownName("train_on_what", str(value), [mode.value for mode in cls])


class ParseTermination(StrEnum):
    """How a sampled turn ended. Ask a predicate: as a truth value it would always be true, so it refuses to be one."""

    STOP_SEQUENCE = "stop_sequence"  # as the family ends a turn
    EOS = "eos"  # by the end-of-text token instead
    MALFORMED = "malformed"  # cut off by the token budget, or going on after its end

    @property
    def is_clean(self) -> bool:
        """Whether the turn was ended, in either way. What is graded as an answer should be."""
        return self is not ParseTermination.MALFORMED

    @property
    def is_stop_sequence(self) -> bool:
        """Whether the turn ended as the family ends one, so that the chat can go on behind it."""
        return self is ParseTermination.STOP_SEQUENCE

    def __bool__(self) -> bool:
        raise TypeError("a ParseTermination is not a truth value; ask .is_clean or .is_stop_sequence")


class SupervisedExample(NamedTuple):
    """A chat to train on. `weights` are float32 (N,), one for each position, not shifted."""

    model_input: ModelInput
    weights: npt.NDArray[np.float32]


class Renderer(Protocol):
    """The language of one model family. Renderers pickle: see `remake`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the model whose language this is."""
        ...

    @property
    def supports_streaming(self) -> bool:
        """Whether `parse_response_streaming` gives more than the message at the end."""
        ...

    @property
    def disables_thinking(self) -> bool:
        """Whether prompts tell the model to answer without thinking; then thinking cannot be trained on either."""
        ...

    @property
    def has_extension_property(self) -> bool:
        """Whether each prompt of a chat begins with the tokens of the one before it and of the answer to that: for
        every answer that is laid out as the family lays it out, whatever white space it begins or ends with."""
        ...

    def get_stop_sequences(self) -> list[str] | list[int]:
        """What ends a turn: token ids, or strings where the family has no token for it. It goes to
        `SamplingParams.stop`."""
        ...

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> ModelInput:
        """The chat so far and the header of the next message, which begins with `prefill`."""
        ...

    def build_supervised_example(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> SupervisedExample:
        """A whole chat. It begins with the tokens of the generation prompt that its first trained message answers."""
        ...

    def build_supervised_examples(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_TURN
    ) -> list[SupervisedExample]:
        """As many examples as it takes to train on each message as it would be sampled; see `supervised_examples`."""
        ...

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, ParseTermination]:
        """The message that sampled tokens say, as far as they go. Whatever the tokens: this never raises."""
        ...

    def parse_response_streaming(self, tokens: Iterable[int]) -> Iterator[MessageDelta]:
        """A `StreamingMessageHeader`, what the message says as it comes, and at last the message as `parse_response`
        has it."""
        ...

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """Messages to begin a chat with that tell the model of its tools."""
        ...


# ---- which messages are trained on -------------------------------------------------------------------------------


def trained_messages(messages: Sequence[Message], train_on_what: TrainOnWhat) -> list[bool]:
    """For each message, whether its output is trained on."""
    check_messages(messages)
    return _trained(messages, train_on_what)


def _trained(messages: Sequence[Message], train_on_what: TrainOnWhat) -> list[bool]:
    """The same of messages that were checked."""
    _check_trainable_flags(messages, train_on_what)
    match train_on_what:
        case TrainOnWhat.LAST_ASSISTANT_MESSAGE:
            if not messages or messages[-1]["role"] != "assistant":
                raise NothingToTrain(
                    "train_on_what=last_assistant_message needs a chat that ends with an assistant message; its roles "
                    f"are: {_roles(messages)}"
                )
            return [False] * (len(messages) - 1) + [True]
        case TrainOnWhat.LAST_ASSISTANT_TURN:
            last_user_index = _last_user_index(messages)
            return [
                index > last_user_index and message["role"] == "assistant" for index, message in enumerate(messages)
            ]
        case TrainOnWhat.ALL_ASSISTANT_MESSAGES:
            return [message["role"] == "assistant" for message in messages]
        case TrainOnWhat.ALL_MESSAGES | TrainOnWhat.ALL_TOKENS:
            return [True] * len(messages)
        case TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES:
            return [message["role"] in ("user", "system") for message in messages]
        case TrainOnWhat.CUSTOMIZED:
            return [message.get("trainable", False) for message in messages]
        case _:
            assert_never(train_on_what)


def _check_trainable_flags(messages: Sequence[Message], train_on_what: TrainOnWhat) -> None:
    customized = train_on_what is TrainOnWhat.CUSTOMIZED
    for index, message in enumerate(messages):
        if customized and "trainable" not in message:
            raise InvalidRequest(
                f"train_on_what=customized needs trainable=True or False on message {index}: {message}"
            )
        if not customized and "trainable" in message:
            raise InvalidRequest(
                f"message {index} has trainable={message['trainable']}, which only train_on_what=customized reads: "
                f"{train_on_what}"
            )


def _last_user_index(messages: Sequence[Message]) -> int:
    return max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message["role"] for message in messages) or "none"


def supervised_examples(
    renderer: Renderer, messages: Sequence[Message], train_on_what: TrainOnWhat, *, merge: bool = False
) -> list[SupervisedExample]:
    """One example, if each prompt extends the one before it. Where a family rewrites earlier turns (it drops old
    thinking, say), one for each trained assistant message: it ends there, and shows the chat as the model sees it then.

    Where it is only some answers that are written otherwise later (their white space is trimmed), `merge` makes one of
    examples that do go on from each other.
    """
    rewritten = not renderer.has_extension_property
    if rewritten and train_on_what in (TrainOnWhat.LAST_ASSISTANT_TURN, TrainOnWhat.ALL_ASSISTANT_MESSAGES):
        trained = [index for index, yes in enumerate(trained_messages(messages, train_on_what)) if yes]
        if trained:
            examples = [
                renderer.build_supervised_example(messages[: index + 1], TrainOnWhat.LAST_ASSISTANT_MESSAGE)
                for index in trained
            ]
            return merged_examples(examples) if merge else examples
    return [renderer.build_supervised_example(messages, train_on_what)]


def merged_examples(examples: Iterable[SupervisedExample]) -> list[SupervisedExample]:
    """The same with an example left out that the next one goes on from, up to its last trained token: the next one is
    then trained on what the first was, too."""
    merged: list[SupervisedExample] = []
    for example in examples:
        if merged:
            *_, before = merged
            end = int(before.weights.nonzero()[0][-1]) + 1
            if end < len(example.weights) and _same_tokens(before.model_input, example.model_input, end):
                merged.pop()
                weights_N = example.weights.copy()
                weights_N[:end] += before.weights[:end]
                example = example._replace(weights=weights_N)
        merged.append(example)
    return merged


def _same_tokens(one: ModelInput, other: ModelInput, end: int) -> bool:
    """Whether the first `end` positions are the same, image for image and token for token."""
    return list(islice(_positions(one), end)) == list(islice(_positions(other), end))


def _positions(model_input: ModelInput) -> Iterator[int | ImageChunk]:
    for chunk in model_input.chunks:
        yield from chunk.tokens if isinstance(chunk, EncodedTextChunk) else [chunk] * chunk.length


# ---- rendered text to tokens and weights -------------------------------------------------------------------------


class Span(NamedTuple):
    """A stretch of a rendered chat whose tokens all have the same weight."""

    pieces: Pieces
    weight: float


def encode_pieces(encoder: SafeEncoder, pieces: Pieces) -> ModelInput:
    """Text between two images is encoded as one string, as a chat template's would be."""
    return weigh(encoder, [Span(pieces, 0.0)]).model_input


def weigh(encoder: SafeEncoder, spans: Iterable[Span]) -> SupervisedExample:
    """Tokens and weights of a rendered chat. Where a weight ends a token ends too, so that no token is half trained.
    Images have weight 0."""
    chunks: list[ModelInputChunk] = []
    stretches: list[tuple[int, float]] = []  # how many positions have which weight
    texts: list[_Weighted] = []
    for pieces, weight in spans:
        for piece in pieces:
            if isinstance(piece, ImageChunk):
                _encode_texts(encoder, texts, chunks, stretches)
                chunks.append(piece)
                stretches.append((piece.length, 0.0))
                texts = []
            elif texts and texts[-1][1] == weight:
                texts[-1][0].append(piece)
            elif piece:
                texts.append(([piece], weight))
    _encode_texts(encoder, texts, chunks, stretches)
    return SupervisedExample(ModelInput(chunks), _weights(stretches))


_Weighted = tuple[list[str], float]  # the pieces of a text, and its weight


def _encode_texts(
    encoder: SafeEncoder,
    texts: Sequence[_Weighted],
    chunks: list[ModelInputChunk],
    stretches: list[tuple[int, float]],
) -> None:
    """Neighbouring texts of different weights become one chunk."""
    parts = encoder.encode_parts(["".join(pieces) for pieces, _ in texts]) if texts else []
    chunk = EncodedTextChunk(chain.from_iterable(parts))
    if chunk.tokens:
        chunks.append(chunk)
        stretches += [(len(part), weight) for part, (_, weight) in zip(parts, texts, strict=True)]


def _weights(stretches: Sequence[tuple[int, float]]) -> npt.NDArray[np.float32]:
    weights_N = np.zeros(sum(length for length, _ in stretches), np.float32)
    start = 0
    for length, weight in stretches:
        if weight:
            weights_N[start : start + length] = weight
        start += length
    return weights_N


def require_no_thinking(
    messages: Sequence[Message],
    train_on_what: TrainOnWhat,
    family: str,
    hint: str,
    thinks: Callable[[Message], bool] = lambda message: bool(get_thinking(message)),
) -> None:
    """Refuses to train on an answer whose thinking the family would leave out of what is written."""
    for index, (message, is_trained) in enumerate(zip(messages, _trained(messages, train_on_what), strict=True)):
        if is_trained and thinks(message):
            raise InvalidRequest(
                f"{family} writes no thinking, so it cannot train on an answer with it; {hint}: message {index}: "
                f"{message}"
            )


def require_no_name(message: Message, where: str) -> None:
    """Refuses a name of who speaks where the family has no place for one. That of a tool says which call its result
    answers, and may be left out."""
    if "name" in message and message["role"] != "tool":
        raise InvalidRequest(
            f"{where}: names of speakers cannot be written; leave out name={message['name']!r}: {message}"
        )


def require_trained(
    example: SupervisedExample, messages: Sequence[Message], train_on_what: TrainOnWhat
) -> SupervisedExample:
    """The example, if it has a token to train on."""
    if not example.weights.any():
        raise NothingToTrain(
            f"train_on_what={train_on_what} leaves no token to train on in this chat; its roles are: {_roles(messages)}"
        )
    return example


# ---- families that write each message by itself ------------------------------------------------------------------


class RenderContext(NamedTuple):
    """Where in its chat a message stands."""

    idx: int
    is_last: bool
    prev_message: Message | None
    next_message: Message | None
    last_user_index: int  # -1 without one
    in_last_assistant_turn: bool  # after the last user message


class RenderedMessage(NamedTuple):
    """One message as text: who speaks, what they say up to the end of the turn, and what of the stop sequence lies
    beyond that (`stop_overlap`: written, and trained with the output, only after the last message)."""

    header: str
    output: Pieces
    stop_overlap: str = ""


RenderMessage = Callable[[Message, RenderContext], RenderedMessage]


def render_messages(render: RenderMessage, messages: Sequence[Message]) -> list[RenderedMessage]:
    """Each message by `render`, which is told where in the chat it stands."""
    last_user_index = _last_user_index(messages)
    return [
        render(
            message,
            RenderContext(
                idx=index,
                is_last=index == len(messages) - 1,
                prev_message=messages[index - 1] if index > 0 else None,
                next_message=messages[index + 1] if index + 1 < len(messages) else None,
                last_user_index=last_user_index,
                in_last_assistant_turn=index > last_user_index,
            ),
        )
        for index, message in enumerate(messages)
    ]


def generation_prompt(
    encoder: SafeEncoder, rendered: Sequence[RenderedMessage], suffix: str, prefill: str | None = None
) -> ModelInput:
    """Begin-of-text, the messages, the header of the next one, and the beginning of what it says."""
    pieces = [piece for message in rendered for piece in (message.header, *message.output)]
    return add_prefill(encoder, encode_pieces(encoder, (encoder.bos, *pieces, suffix)), prefill)


def add_prefill(encoder: SafeEncoder, prompt: ModelInput, prefill: str | None) -> ModelInput:
    """A prefill has tokens of its own, as sampled tokens would."""
    tokens = encoder.encode(encoder.protect_own(prefill)) if prefill else []
    if not tokens:
        return prompt
    *chunks, last = prompt.chunks
    if isinstance(last, EncodedTextChunk):
        return ModelInput([*chunks, EncodedTextChunk([*last.tokens, *tokens])])
    return prompt.append(EncodedTextChunk(tokens))


def supervised_example(
    encoder: SafeEncoder,
    rendered: Sequence[RenderedMessage],
    messages: Sequence[Message],
    train_on_what: TrainOnWhat,
    ending: str = "",
) -> SupervisedExample:
    """Begin-of-text and the messages, which were checked, with the weights that `train_on_what` gives their headers and
    outputs, and what the family writes behind a whole chat. A family whose prompts say more than who speaks (an empty
    reasoning block) has that in the header of the answer too."""
    header_weight = float(train_on_what is TrainOnWhat.ALL_TOKENS)
    spans = [Span((encoder.bos,), 0.0)]
    trained = _trained(messages, train_on_what)
    for message, is_trained in zip(rendered, trained, strict=True):
        spans += [Span((message.header,), header_weight), Span(message.output, float(is_trained))]
    if rendered:
        spans.append(Span((rendered[-1].stop_overlap,), float(trained[-1])))
    spans.append(Span((ending,), header_weight))
    return require_trained(weigh(encoder, spans), messages, train_on_what)


# ---- sampled tokens to a message ---------------------------------------------------------------------------------


def assistant_message(content: str) -> Message:
    """A message of the assistant with this text."""
    return Message(role="assistant", content=content)


def split_at_stop(
    tokens: Sequence[int], tokenizer: Tokenizer, stop_tokens: Sequence[int]
) -> tuple[list[int], ParseTermination]:
    """The tokens before the first stop token. Clean is a turn that ends with its only one, or with end-of-text."""
    tokens = list(tokens)
    end = next((index for index, token in enumerate(tokens) if token in stop_tokens), None)
    if end is not None:
        at_end = end == len(tokens) - 1
        return tokens[:end], ParseTermination.STOP_SEQUENCE if at_end else ParseTermination.MALFORMED
    if tokens and tokens.index(tokens[-1]) == len(tokens) - 1 and tokens[-1] == tokenizer.eos_token_id:
        return tokens[:-1], ParseTermination.EOS
    return tokens, ParseTermination.MALFORMED


def split_at_stop_text(tokens: Sequence[int], tokenizer: Tokenizer, stop: str) -> tuple[str, ParseTermination]:
    """The text before the first `stop` where that is text. Clean is a turn whose last token completes its only one, or
    is an end-of-text token without one."""
    tokens = list(tokens)
    ended = bool(tokens) and tokens[-1] == tokenizer.eos_token_id
    answer, found, _ = tokenizer.decode(tokens[:-1] if ended else tokens).partition(stop)
    if not found:
        return answer, ParseTermination.EOS if ended else ParseTermination.MALFORMED
    at_end = not ended and stop not in tokenizer.decode(tokens[:-1])
    return answer, ParseTermination.STOP_SEQUENCE if at_end else ParseTermination.MALFORMED


def parse_response_for_stop_token(
    tokens: Sequence[int], tokenizer: Tokenizer, stop_token: int
) -> tuple[Message, ParseTermination]:
    """The text before the first stop token, and how the turn ended."""
    answer, termination = split_at_stop(tokens, tokenizer, [stop_token])
    return assistant_message(tokenizer.decode(answer)), termination


def parsed_at_once(renderer: Renderer, tokens: Iterable[int]) -> Iterator[MessageDelta]:
    """What a renderer streams that does not support it: the header, and at the end the whole message."""
    yield StreamingMessageHeader()
    message, _ = renderer.parse_response(list(tokens))
    yield message


def tokens_weights_from_strings_weights(
    strings_weights: Iterable[tuple[str, float]], tokenizer: Tokenizer
) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Tokens of strings that are encoded one by one, each with its string's weight. Only the first is encoded with the
    special tokens that the tokenizer adds, such as begin-of-text."""
    tokens: list[int] = []
    weights: list[float] = []
    for index, (string, weight) in enumerate(strings_weights):
        encoded = tokenizer.encode(string, add_special_tokens=index == 0)
        tokens.extend(encoded)
        weights.extend([weight] * len(encoded))
    return tokens, np.asarray(weights, np.float32)


# ---- pickling ----------------------------------------------------------------------------------------------------


def remake(make: Callable[..., Made], tokenizer: Tokenizer | TokenizerName, *others: object) -> Made:
    """What renderers are pickled as a call of: the tokenizer goes by its name, where it has one, not as megabytes.

    def __reduce__(self):
        return remake, (RoleColonRenderer, named(self.tokenizer))
    """
    return make(get_tokenizer(tokenizer.name) if isinstance(tokenizer, TokenizerName) else tokenizer, *others)
