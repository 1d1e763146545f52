"""Prompt distillation: a teacher that sees a long prompt shows what it answers to texts, and the student learns to
answer so without the prompt. Here are the answers; learning them is supervised learning on chats.
"""

import re
from collections.abc import Callable, Sequence

from stovetop.completers import MessageCompleter
from stovetop.concurrency import map_together
from stovetop.errors import InvalidRequest
from stovetop.renderers.messages import Message, ensure_text, get_text_content

TEXT = "{text}"  # in a prompt: where the text goes

Prompt = Sequence[Message]  # a chat up to the answer; the last message, of the user, has {text}


def check_prompt(prompt: Prompt) -> Prompt:
    """The prompt. Refused is one without a place for the text."""
    if not prompt or prompt[-1]["role"] != "user" or TEXT not in ensure_text(prompt[-1]["content"]):
        said = ensure_text(prompt[-1]["content"])[-80:] if prompt else ""
        raise InvalidRequest(
            f"a prompt has {TEXT} where the text goes, in a last message of the user: it ends in {said!r}"
        )
    return prompt


def with_text(prompt: Prompt, text: str) -> list[Message]:
    """What the teacher reads."""
    *before, last = prompt
    return [*before, Message(role="user", content=ensure_text(last["content"]).replace(TEXT, text))]


def compile_answer_pattern(answer_pattern: str) -> re.Pattern[str]:
    """The regular expression whose first group is what of an answer is learnt."""
    try:
        pattern = re.compile(answer_pattern)
    except re.error as error:
        raise InvalidRequest(f"answer_pattern is no regular expression ({error}): {answer_pattern!r}") from error
    if pattern.groups < 1:
        raise InvalidRequest(f"answer_pattern needs a group, (...), around what is learnt: {answer_pattern!r}")
    return pattern


async def answer_with_prompt(
    teacher_of: Callable[[int], MessageCompleter],
    texts: Sequence[str],
    prompt: Prompt,
    answer_pattern: str,
    *,
    limit: int = 64,
) -> list[list[Message] | None]:
    """For each text, in order, a chat: the text, without the prompt, and what is learnt of the answer that
    `teacher_of(index)` gives. None where the answer does not match. At most `limit` texts are answered at a time."""
    check_prompt(prompt)
    pattern = compile_answer_pattern(answer_pattern)

    async def chat_of(index: int) -> list[Message] | None:
        text = texts[index]
        answer = await teacher_of(index)(with_text(prompt, text))
        found = pattern.search(get_text_content(answer))
        if found is None or not found[1]:
            return None
        return [Message(role="user", content=text), Message(role="assistant", content=found[1])]

    return await map_together(chat_of, range(len(texts)), limit=limit, name="answer with the prompt")
