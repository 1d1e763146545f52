"""Instructions whose following a rule can check, such as "no commas" or "at least 300 words" (IFEval, Zhou et al. 2023,
arXiv:2311.07911). The 25 rules are those of its authors, from the package if-verifiable (the extra `ifeval`). Two of
them count sentences or words with data that NLTK downloads; rows with these are left out where the data is not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from stovetop.concurrency import in_thread
from stovetop.datasets import Row
from stovetop.errors import GradeError
from stovetop.extras import import_extra
from stovetop.named_data import LeftOut
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, get_text_content
from stovetop.rl.problem_env import OneTurnEnv, TurnResult
from stovetop.rl.types import Action

SENTENCE_RULES = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
SENTENCE_DATA = "tokenizers/punkt_tab/english/"
WITHOUT_DATA = "its rule needs data of NLTK that is not on this machine (python -m nltk.downloader punkt_tab)"

RuleArguments = Mapping[str, str | int | float | list[str]]


class Instruction(NamedTuple):
    """A rule that an answer has to follow, by its name in IFEval, and what it is about."""

    rule: str  # "length_constraints:number_words"
    arguments: RuleArguments  # {"relation": "at least", "num_words": 300}


@dataclass(frozen=True, slots=True)
class InstructedPrompt:
    """A prompt, and the instructions in it."""

    id: str
    prompt: str
    instructions: tuple[Instruction, ...]


class Followed(NamedTuple):
    """How many instructions an answer follows: as it is, and leniently, without its first or last line or asterisks."""

    strict: int
    loose: int


def parse_instructions(row: Row) -> InstructedPrompt | LeftOut:
    """`prompt`, `instruction_id_list`, and `kwargs` with an object for each of these; `key` is the id. The names of
    rules may begin with a language, as in `en:punctuation:no_comma`."""
    prompt, names, arguments = row.get("prompt"), row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(prompt, str) or not prompt.strip():
        return LeftOut("it has no prompt")
    if not isinstance(names, list) or not isinstance(arguments, list) or not 0 < len(names) == len(arguments):
        return LeftOut("it has no instruction_id_list, or not one object of kwargs for each of them")
    rules = [str(name).removeprefix("en:") for name in names]
    if not set(rules) <= _known_rules().keys():
        return LeftOut("it has a rule that IFEval does not have")
    if not SENTENCE_RULES.isdisjoint(rules) and not _has_sentence_data():
        return LeftOut(WITHOUT_DATA)
    given = [_without_none(each) for each in cast("list[object]", arguments)]
    return InstructedPrompt(str(row.get("key", "")), prompt, tuple(map(Instruction, rules, given)))


def followed(answer: str, prompt: InstructedPrompt) -> Followed:
    """Of an answer without its thinking. One that is empty follows none."""
    if not answer.strip():
        return Followed(0, 0)
    common, rules = _package("if_verifiable.common"), _known_rules()
    try:
        results, _ = common.evaluate_instructions(
            answer,
            [instruction.rule for instruction in prompt.instructions],
            [dict(instruction.arguments) for instruction in prompt.instructions],
            prompt.prompt,
            rules,
        )
    except Exception as error:
        raise GradeError(f"the rules of prompt {prompt.id} cannot be checked: {error!r}") from error
    return Followed(sum(result.strict_pass for result in results), sum(result.loose_pass for result in results))


@dataclass(frozen=True, slots=True)
class InstructionEnv(OneTurnEnv):
    """A prompt with instructions. The reward is the share of the instructions that are followed strictly. Metrics:
    `correct` and `correct_loose`, whether all are; `followed`, `followed_loose` and `instructions`, how many."""

    asked: InstructedPrompt
    renderer: Renderer

    def get_chat(self) -> Sequence[Message]:
        return [Message(role="user", content=self.asked.prompt)]

    async def grade(self, action: Action) -> TurnResult:
        message, _ = self.renderer.parse_response(action.tokens)
        text, num = get_text_content(message), len(self.asked.instructions)
        strict, loose = await in_thread(lambda: followed(text, self.asked))
        return TurnResult(
            strict / num,
            {
                "correct": float(strict == num),
                "correct_loose": float(loose == num),
                "followed": strict,
                "followed_loose": loose,
                "instructions": num,
            },
        )


# ---- the package -----------------------------------------------------------------------------------------------------


def _known_rules() -> Mapping[str, Any]:
    return _package("if_verifiable.ifeval.instructions_registry").INSTRUCTION_DICT


def _package(module: str) -> Any:
    # The rules on language use langdetect, which samples; its documentation advises a seed, so that its answers are the
    # same every time.
    import_extra("langdetect", "ifeval").DetectorFactory.seed = 0
    return import_extra(module, "ifeval")


def _has_sentence_data() -> bool:
    try:
        import_extra("nltk", "ifeval").data.find(SENTENCE_DATA)
    except LookupError:
        return False
    return True


def _without_none(arguments: object) -> RuleArguments:
    """Parquet files give every object the fields of all others, as null."""
    if not isinstance(arguments, Mapping):
        return {}
    return {name: value for name, value in cast("Mapping[str, Any]", arguments).items() if value is not None}
