"""Which published chat templates the renderer `chat_template` can use, and for what.

    python benchmarks/templates.py FOLDER [--all]

FOLDER holds chat templates (*.jinja, also in folders below it); files with the same text count once. Each gets a small
tokenizer whose control tokens are the strings in the template that look like some. A template is *usable* when a chat
of a question and an answer, with thinking or without, can be trained on with some of the options that it knows. Printed
are the templates that are not, and why; with --all each template with what it can write.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stovetop.errors import InvalidRequest
from stovetop.renderers.base import SupervisedExample
from stovetop.renderers.messages import FunctionCall, Message, ThinkingPart, ToolCall
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.tokenizing import Tokenizer

# words between < and > that are tokens in the families that write them: those that a model writes within its turn ...
_OWN_TAGS = (
    *("think", "tool_call", "tool_response", "arg_key", "arg_value", "seed:think", "seed:tool_call", "mm:think"),
    "minimax:tool_call",
)
_TAGS = (  # ... and all
    *_OWN_TAGS,
    *("s", "bos", "eos", "sop", "sep", "seed:bos", "seed:eos", "start_of_turn", "end_of_turn"),
    *("start_of_image", "end_of_utterance", "beginning_of_sentence", "end_of_sentence", "assistant", "system", "user"),
    *("role", r"SPECIAL_\d+"),
)
_OWN = re.compile(rf"</?(?:{'|'.join(_OWN_TAGS)})>")
_CONTROL = re.compile(
    rf"<\|[^|<>\s\"]{{1,40}}\|>|<｜[^｜\s]{{1,40}}｜>|\[/?[A-Z_]{{3,}}\]|</?(?:{'|'.join(_TAGS)})>|\[gMASK\]|\]~!?b\[?\]?"
    r"|\[e~\[|<\|(?:turn|channel|tool|tool_call|tool_response|\"\|)>|<(?:turn|channel|tool|tool_call|tool_response)\|>"
)
_OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"thinking": True},
    {"functions": "[]", "datetime": "today"},
)

_ASKED: list[Message] = [{"role": "user", "content": "QUESTION"}]
_ANSWER: Message = {"role": "assistant", "content": "ANSWER"}
_THOUGHT = ThinkingPart(type="thinking", thinking="THOUGHT")
_THINKING: Message = {"role": "assistant", "content": [_THOUGHT, {"type": "text", "text": "ANSWER"}]}
_CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [ToolCall(FunctionCall("get_weather", '{"city": "Paris"}'), id="call00001")],
}
_THINKING_CALL: Message = {**_CALLING, "content": [_THOUGHT]}
_RESULT: Message = {"role": "tool", "content": "RESULT", "name": "get_weather", "tool_call_id": "call00001"}

CHATS: Mapping[str, Sequence[Message]] = {
    "answers": [*_ASKED, _ANSWER],
    "thinking": [*_ASKED, _THINKING],
    "several turns": [*_ASKED, _ANSWER, *_ASKED, _ANSWER],
    "several thinking turns": [*_ASKED, _THINKING, *_ASKED, _THINKING],
    "system messages": [{"role": "system", "content": "SYSTEM"}, *_ASKED, _ANSWER],
    "system messages before thinking": [{"role": "system", "content": "SYSTEM"}, *_ASKED, _THINKING],
    "calls": [*_ASKED, _CALLING],
    "calls after thinking": [*_ASKED, _THINKING_CALL],
    "results of calls": [*_ASKED, _CALLING, _RESULT, _ANSWER],
    "results of calls before thinking": [*_ASKED, _THINKING_CALL, _RESULT, _THINKING],
}


@dataclass(frozen=True, slots=True)
class Report:
    """What a template can write, each with the options that it takes, and why it cannot write the rest."""

    name: str
    written: Mapping[str, Mapping[str, object]]
    refused: Mapping[str, str]

    @property
    def is_usable(self) -> bool:
        return "answers" in self.written or "thinking" in self.written


def tokenizer_for(source: str) -> Tokenizer:
    """Bytes, and the control strings of a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    hunyuan = [found.replace("{}", ":opensource") for found in re.findall(r"<｜hy_\w+\{\}｜>", source)]
    for text in dict.fromkeys(["<s>", "</s>", *_CONTROL.findall(source), *hunyuan]):
        bpe.add_tokens([AddedToken(text, special=_OWN.fullmatch(text) is None, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = source
    return cast(Tokenizer, tokenizer)


def report(name: str, source: str) -> Report:
    tokenizer = tokenizer_for(source)
    written: dict[str, Mapping[str, object]] = {}
    refused: dict[str, str] = {}
    for options in _OPTIONS:
        try:
            renderer = ChatTemplateRenderer(tokenizer, options)
        except InvalidRequest as error:
            for kind in CHATS:
                refused.setdefault(kind, str(error))
            continue
        for kind, chat in CHATS.items():
            if kind not in written:
                try:
                    check(renderer, chat)
                    written[kind] = options
                except InvalidRequest as error:
                    refused.setdefault(kind, str(error))
    return Report(name, written, {kind: refused[kind] for kind in CHATS if kind not in written})


def check(renderer: ChatTemplateRenderer, chat: Sequence[Message]) -> None:
    """Makes the example of a chat. What it is trained on is the last message and its end, and is read as that."""
    example = renderer.build_supervised_example(chat)
    text = renderer.tokenizer.decode(trained_tokens(example))
    assert text.endswith(renderer.stops), text
    message, termination = renderer.parse_response(trained_tokens(example))
    assert termination.is_stop_sequence
    if not chat[-1].get("tool_calls"):
        assert message == chat[-1], (message, chat[-1])
    assert renderer.build_supervised_examples(chat)


def trained_tokens(example: SupervisedExample) -> list[int]:
    return [token for token, weight in zip(example.model_input.to_ints(), example.weights, strict=True) if weight]


def reports(folder: Path) -> list[Report]:
    sources: dict[str, str] = {}
    for file in sorted(folder.rglob("*.jinja")):
        sources.setdefault(file.read_text(encoding="utf-8"), str(file.relative_to(folder)))
    return [report(name, source) for source, name in sources.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Which chat templates the renderer chat_template can use.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="tell of every template what it can write")
    arguments = parser.parse_args()
    found = reports(arguments.folder)
    unusable = [one for one in found if not one.is_usable]
    for one in unusable:
        print(f"{one.name}: not usable: {one.refused['answers']}")
    for one in found if arguments.all else []:
        print(f"{one.name}: {'usable' if one.is_usable else 'not usable'}")
        for kind, options in one.written.items():
            print(f"    {kind}{f', with {dict(options)}' if options else ''}")
        for kind, reason in one.refused.items():
            print(f"    no {kind}: {reason}")
    print(f"{len(found) - len(unusable)} of {len(found)} templates are usable, {len(unusable)} are not")


if __name__ == "__main__":
    main()
