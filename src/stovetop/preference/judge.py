"""A judge that is asked in words, and answers in words: any model that follows instructions, trained on comparisons or
not. One that was trained to answer with a single token is in reward_model.
"""

import re
from dataclasses import dataclass, field

from stovetop.completers import MessageCompleter
from stovetop.preference.reward_model import Verdict
from stovetop.preference.types import Comparison
from stovetop.renderers.messages import Message, get_text_content

INSTRUCTION = (
    "Which answer is better: more correct, more helpful, and no longer than it need be? Length and order are no merit. "
    'Think it over in a few sentences if you like. Then end with one line: "Verdict: A", "Verdict: B" or '
    '"Verdict: Tie".'
)
_VERDICT = re.compile(r"\b(A|B|Tie|tie)\b\W*$")


@dataclass(slots=True)
class JudgeCompleter:
    """A PreferenceModel: puts a comparison to a message completer as one question, and reads the last word of its
    answer. An answer without a verdict counts as a tie, and is counted."""

    completer: MessageCompleter
    instruction: str = INSTRUCTION
    num_asked: int = field(init=False, default=0)
    num_without_answer: int = field(init=False, default=0)

    async def __call__(self, comparison: Comparison) -> float:
        answer = await self.completer([Message(role="user", content=self._question(comparison))])
        verdict = read_verdict(get_text_content(answer))
        self.num_asked += 1
        self.num_without_answer += not verdict.is_answer
        return verdict.score

    def _question(self, comparison: Comparison) -> str:
        parts = {
            "The conversation": comparison.prompt_conversation,
            "Answer A": comparison.completion_A,
            "Answer B": comparison.completion_B,
        }
        blocks = [
            f"==== {title} ====\n" + "\n".join(f"{each['role']}: {get_text_content(each)}" for each in messages)
            for title, messages in parts.items()
        ]
        return "\n\n".join([*blocks, f"==== Your task ====\n{self.instruction}"])


def read_verdict(text: str) -> Verdict:
    """What the last word of an answer says: A, B or Tie; else NONE."""
    found = _VERDICT.search(text.strip())
    if found is None:
        return Verdict.NONE
    return {"a": Verdict.A, "b": Verdict.B, "tie": Verdict.TIE}[found[1].lower()]
