"""What `stovetop show` says of a chat: its tokens, coloured by whether they are trained, how many there are, and what
each of the assistant's turns would be read back as, had the model sampled it.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from stovetop.renderers.base import ParseTermination, Renderer, SupervisedExample, TrainOnWhat
from stovetop.renderers.display import format_colorized
from stovetop.renderers.messages import Message, get_text_content, get_thinking
from stovetop.types import EncodedTextChunk

MARK = "¦"  # around what is trained, where there are no colours


def describe_chat(
    renderer: Renderer, messages: Sequence[Message], train_on_what: TrainOnWhat, *, colours: bool
) -> Iterator[str]:
    """Line by line: each example that the chat makes, then each turn of the assistant as it is read back."""
    examples = renderer.build_supervised_examples(messages, train_on_what)
    for number, example in enumerate(examples, start=1):
        which = f"example {number} of {len(examples)}: " if len(examples) > 1 else ""
        num_trained = int((example.weights > 0).sum())
        yield f"{which}{example.model_input.length} tokens, {num_trained} trained"
        yield paint(renderer, example) if colours else mark(renderer, example)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            yield from _read_back(renderer, messages, index)


def paint(renderer: Renderer, example: SupervisedExample) -> str:
    """The whole example: what is trained in green, the rest in yellow."""
    text, position = "", 0
    for chunk in example.model_input.chunks:
        weights = example.weights[position : position + chunk.length].tolist()
        position += chunk.length
        if isinstance(chunk, EncodedTextChunk):
            text += format_colorized(chunk.tokens, weights, renderer.tokenizer)
        else:
            text += _image(chunk.length)
    return text


def mark(renderer: Renderer, example: SupervisedExample) -> str:
    """The whole example, with ¦ where training begins and ends."""
    return "".join(f"{MARK}{text}{MARK}" if trained else text for text, trained in stretches(renderer, example))


def stretches(renderer: Renderer, example: SupervisedExample) -> Iterator[tuple[str, bool]]:
    """The example cut where training begins or ends: the text, and whether it is trained."""
    position = 0
    for chunk in example.model_input.chunks:
        weights = example.weights[position : position + chunk.length]
        position += chunk.length
        if not isinstance(chunk, EncodedTextChunk):
            yield _image(chunk.length), False
            continue
        for trained, run in groupby(zip(chunk.tokens, weights, strict=True), key=lambda pair: bool(pair[1] > 0)):
            yield renderer.tokenizer.decode([token for token, _ in run]), trained


def _image(num_tokens: int) -> str:
    return f"[image, {num_tokens} tokens]"


def _read_back(renderer: Renderer, messages: Sequence[Message], index: int) -> Iterator[str]:
    chat = [_without_flag(message) for message in messages[: index + 1]]
    example = renderer.build_supervised_example(chat, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    trained = example.weights > 0
    tokens = [token for token, yes in zip(_tokens(example), trained, strict=True) if yes]
    message, termination = renderer.parse_response(tokens)
    again = renderer.build_supervised_example([*chat[:-1], message], TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    same = "the same tokens" if again.model_input == example.model_input else "OTHER TOKENS"
    yield f"message {index} reads back ({termination.value}) and is written again as {same}:"
    yield from (f"  {line}" for line in _summary(message, termination))


def _tokens(example: SupervisedExample) -> list[int]:
    """One for each position; those of an image, which are never trained, are 0."""
    return [
        token
        for chunk in example.model_input.chunks
        for token in (chunk.tokens if isinstance(chunk, EncodedTextChunk) else [0] * chunk.length)
    ]


def _without_flag(message: Message) -> Message:
    """Every turn is read back, trained or not."""
    plain = message.copy()
    plain.pop("trainable", None)
    return plain


def _summary(message: Message, termination: ParseTermination) -> Iterator[str]:
    if thinking := get_thinking(message):
        yield f"thinking   {thinking!r}"
    if text := get_text_content(message):
        yield f"text       {text!r}"
    for call in message.get("tool_calls", []):
        yield f"calls      {call.function.name} {call.function.arguments}"
    for failed in message.get("unparsed_tool_calls", []):
        yield f"no call    {failed.raw_text!r}: {failed.error}"
    if not termination.is_clean:
        yield "it does not end as the family ends a turn"
