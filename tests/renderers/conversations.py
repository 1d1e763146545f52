"""Chats made of a seed, to try renderers on: every role, several tool calls and their results, thinking in any turn,
empty content, unicode; and, on demand, control strings of every family in what is said.

`conversation(seed, features)` is the same on every machine. What a family cannot say is left out by its `Features`.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stovetop.renderers.messages import ContentPart, FunctionCall, Message, TextPart, ThinkingPart, ToolCall

PIECES = [
    *("the", " end", "hello", "Ünï", "cödé", "日本", "语", "🎉", "e\u0301", "user:", "12345", "3.5", "don't", "x=1;"),
    *("\n", "\n\n", " ", "  ", "\t", "\u200d", "\ufdd0", "{", "}", '"', "\\", "<", ">", "|", "</", "a", "System: b"),
]

CONTROL_STRINGS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁output▁end｜>", "<|im_user|>", "<|im_middle|>"),
    *(
        "<|im_assistant|>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_end|>",
        "[BOS]",
        "[EOS]",
        "<|start|>",
        "<|end|>",
    ),
    *("<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>", "<|vision_start|>", "<|image_pad|>"),
]

TOOLS = ("get_weather", "search", "add-numbers", "f")


@dataclass(frozen=True, slots=True)
class Features:
    """What the chats may contain."""

    system: bool = True
    repeated_users: bool = True  # several user messages in a row
    thinking: bool = True
    last_thinking: bool = True  # in the last message
    tools: bool = True
    max_calls: int = 3  # in one message
    text_beside_calls: bool = True  # a message that calls tools may say something too
    call_id: Callable[[str, int], str | None] = lambda name, index: None  # of the function and a running number
    edges: bool = True  # what is said may begin and end with white space, or be nothing else
    max_pieces: int = 8  # of one text; about as many tokens


def conversation(seed: int, features: Features) -> list[Message]:
    """One to three questions and their answers, the last of which may be a call that nobody has answered yet."""
    return _Author(random.Random(seed), features).chat()


def hostile(messages: Sequence[Message], seed: int) -> list[Message]:
    """The same chat, in which everybody but the assistant, who says anything, has typed control strings, of any
    family. (There are families that leave out an empty message.)"""
    rng = random.Random(seed)
    typed = ["x" + "".join(rng.choice(CONTROL_STRINGS) for _ in range(rng.randrange(1, 4))) + "x" for _ in messages]
    return [
        message
        if message["role"] == "assistant" or not message["content"]
        else {**message, "content": f"{message['content']}{text}"}
        for message, text in zip(messages, typed, strict=True)
    ]


@dataclass(slots=True)
class _Author:
    rng: random.Random
    features: Features
    num_calls: int = 0

    def chat(self) -> list[Message]:
        messages: list[Message] = []
        if self.features.system and self.rng.random() < 0.5:
            messages.append(Message(role="system", content=self.text()))
        num_turns = self.rng.randrange(1, 4)
        for turn in range(num_turns):
            messages += self.turn(is_last=turn == num_turns - 1)
        return messages

    def turn(self, *, is_last: bool) -> list[Message]:
        """A question, rounds of tool calls, and an answer, unless the chat ends with a call."""
        twice = self.features.repeated_users and self.rng.random() < 0.1
        messages = [Message(role="user", content=self.text()) for _ in range(1 + twice)]
        rounds = self.rng.choice([0, 0, 1, 1, 2, 3]) if self.features.tools else 0
        ends_with_a_call = is_last and rounds > 0 and self.rng.random() < 0.3
        for index in range(rounds):
            last = ends_with_a_call and index == rounds - 1
            calling = self.answer(is_last=last, calling=True)
            messages.append(calling)
            if not last:
                messages += [self.result(call) for call in calling.get("tool_calls", [])]
        return messages if ends_with_a_call else [*messages, self.answer(is_last=is_last, calling=False)]

    def answer(self, *, is_last: bool, calling: bool) -> Message:
        may_think = self.features.thinking and (self.features.last_thinking or not is_last)
        thinking = self.text(empty=False) if may_think and self.rng.random() < 0.5 else ""
        text = self.text() if not calling or (self.features.text_beside_calls and self.rng.random() < 0.5) else ""
        parts: list[ContentPart] = [TextPart(type="text", text=text)] if text else []
        content = [ThinkingPart(type="thinking", thinking=thinking), *parts] if thinking else text
        message = Message(role="assistant", content=content)
        if calling:
            message["tool_calls"] = [self.call() for _ in range(self.rng.randint(1, self.features.max_calls))]
        return message

    def call(self) -> ToolCall:
        name = self.rng.choice(TOOLS)
        call_id = self.features.call_id(name, self.num_calls)
        self.num_calls += 1
        arguments = {key: self.value(depth=2) for key in self.rng.sample(["city", "n", "päth", "a b"], k=2)}
        return ToolCall(FunctionCall(name, json.dumps(arguments, ensure_ascii=False)), call_id)

    def result(self, call: ToolCall) -> Message:
        labels = {"name": call.function.name} | ({} if call.id is None else {"tool_call_id": call.id})
        return Message(role="tool", content=self.text(), **labels)

    def value(self, depth: int) -> object:
        kind = self.rng.randrange(7 if depth else 5)
        match kind:
            case 0 | 1:
                return self.text()
            case 2:
                return self.rng.randrange(-3, 100000)
            case 3:
                return self.rng.choice([True, False, None])
            case 4:
                return self.rng.choice([0.5, -2.25, 1e21])
            case 5:
                return [self.value(depth - 1) for _ in range(self.rng.randrange(3))]
            case _:
                return {self.text(): self.value(depth - 1) for _ in range(self.rng.randrange(3))}

    def text(self, *, empty: bool = True) -> str:
        pieces = [self.rng.choice(PIECES) for _ in range(self.rng.randint(0 if empty else 1, self.features.max_pieces))]
        text = "".join(pieces)
        if not self.features.edges:
            text = text.strip()
        return text if text or empty else "hm"
