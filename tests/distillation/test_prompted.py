"""Answers with a long prompt: what of them is learnt, and in which chats."""

import asyncio
from collections.abc import Sequence

import pytest

from stovetop.distillation.prompted import answer_with_prompt, check_prompt, compile_answer_pattern, with_text
from stovetop.errors import InvalidRequest
from stovetop.renderers.messages import Message, ensure_text


class Teacher:
    """Says what it was asked, in front of one answer for each text."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def __call__(self, messages: Sequence[Message]) -> Message:
        [message] = messages
        self.asked.append(ensure_text(message["content"]))
        text = self.asked[-1].removeprefix("Long. ").removesuffix(" Short.")
        return Message(role="assistant", content=self.answers[text])


def chats_of(teacher: Teacher, pattern: str = r"Final Answer: (\w*)") -> list[list[Message] | None]:
    return asyncio.run(
        answer_with_prompt(
            lambda _: teacher, list(teacher.answers), [Message(role="user", content="Long. {text} Short.")], pattern
        )
    )


def test_the_teacher_sees_the_prompt_and_the_chat_has_the_text_and_the_answer_alone() -> None:
    teacher = Teacher(hallo="Final Answer: de", hello="I think.\nFinal Answer: en. Or not?")
    assert chats_of(teacher) == [
        [Message(role="user", content="hallo"), Message(role="assistant", content="de")],
        [Message(role="user", content="hello"), Message(role="assistant", content="en")],
    ]
    assert teacher.asked == ["Long. hallo Short.", "Long. hello Short."]


def test_an_answer_that_does_not_match_or_in_which_nothing_is_to_be_learnt_has_no_chat() -> None:
    assert [chat is None for chat in chats_of(Teacher(a="de", b="Final Answer: ", c="Final Answer: el"))] == [
        True,
        True,
        False,
    ]


def test_a_prompt_may_be_a_chat_with_examples() -> None:
    prompt = [
        Message(role="user", content="a"),
        Message(role="assistant", content="b"),
        Message(role="user", content="{text}!"),
    ]
    assert with_text(prompt, "c")[-1] == Message(role="user", content="c!")
    assert with_text(prompt, "c")[:2] == prompt[:2]


def test_thinking_is_not_searched_for_the_answer() -> None:
    class Thinker(Teacher):
        async def __call__(self, messages: Sequence[Message]) -> Message:
            parts = [
                {"type": "thinking", "thinking": "Final Answer: en?"},
                {"type": "text", "text": "Final Answer: de"},
            ]
            return Message(role="assistant", content=parts)  # pyright: ignore[reportArgumentType]  # parts as literals

    [chat] = chats_of(Thinker(hallo=""))
    assert chat is not None
    assert chat[1]["content"] == "de"


def test_a_text_with_braces_goes_into_the_prompt_as_it_is() -> None:
    teacher = Teacher(**{"{text} {x} \\1": "Final Answer: ot"})
    assert chats_of(teacher) != [None]
    assert teacher.asked == ["Long. {text} {x} \\1 Short."]


def test_a_prompt_without_a_place_for_the_text_and_a_pattern_without_a_group_are_refused() -> None:
    for prompt in ([], [Message(role="user", content="Classify.")], [Message(role="system", content="{text}")]):
        with pytest.raises(InvalidRequest, match=r"a prompt has \{text\} where the text goes"):
            check_prompt(prompt)
    with pytest.raises(InvalidRequest, match=r"needs a group.*'Final Answer: \\\\w'"):
        compile_answer_pattern(r"Final Answer: \w")
    with pytest.raises(InvalidRequest, match="no regular expression"):
        compile_answer_pattern("Final Answer: (")
