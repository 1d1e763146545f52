import json
from pathlib import Path

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import InvalidRequest, SandboxUnavailable, SeveralProblems, UnknownName
from stovetop.evaluation.chats import HeldOutChats
from stovetop.evaluation.labels import LabelSet
from stovetop.evaluation.pairwise import PairwiseSet
from stovetop.evaluation.problems import ProblemSet
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.tasks.evaluation_kinds import Asking
from stovetop.tasks.evaluation_sets import KINDS, load_sets, open_tools
from stovetop.tasks.program_sets import ProgramProblem, parse_mbpp
from stovetop.tasks.sandbox import bubblewrap

RENDERER = ChatTemplateRenderer(ByteTokenizer())
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_every_kind_of_set_becomes_examples(tmp_path: Path):
    mbpp = {"text": "t", "code": "c", "test_list": ["assert f()"]}
    humaneval = {"prompt": "def f():\n", "entry_point": "f", "test": "def check(f): ..."}
    terms = [
        "sample:gsm8k",
        "math500:" + write(tmp_path / "math.jsonl", {"problem": "1+1?", "answer": "2", "solution": "2"}),
        "mbpp:" + write(tmp_path / "mbpp.jsonl", {"task_id": 11, **mbpp}, {"task_id": 12, **mbpp}),
        "humaneval:" + write(tmp_path / "humaneval.jsonl", {"task_id": "HumanEval/0", **humaneval}),
        "ifeval:"
        + write(
            tmp_path / "ifeval.jsonl",
            {"key": 5, "prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        ),
        "labels:" + write(tmp_path / "mail.jsonl", {"question": "q", "answer": "ham"}),
        "pairwise:" + write(tmp_path / "answers.jsonl", CHAT, {"prompt": "p", "chosen": "c", "rejected": "r"}),
        write(tmp_path / "held_out.jsonl", CHAT),
    ]
    loaded = load_sets(terms)
    assert [(each.name, each.ids, each.needs) for each in loaded] == [
        ("gsm8k", tuple(map(str, range(len(loaded[0].ids)))), "mathematics"),
        ("math500", ("0",), "mathematics"),
        ("mbpp", ("11", "12"), "programs"),
        ("humaneval", ("HumanEval/0",), "programs"),
        ("ifeval", ("5",), None),
        ("mail", ("0",), None),
        ("answers", ("0", "1"), "judge"),
        ("held_out", ("0",), None),
    ]
    assert {each.name for each in loaded[:5]} | {"labels", "pairwise"} == set(KINDS)

    async def judge(_: object) -> float:
        return 0.0

    with open_tools(loaded, judge=judge, grade_program=lambda program, problem: True) as tools:
        made = [each.make(RENDERER, Asking(max_tokens=9), tools) for each in loaded]
    assert [type(each) for each in made] == [ProblemSet] * 5 + [LabelSet, PairwiseSet, HeldOutChats]
    assert [each.ids for each in made] == [list(each.ids) for each in loaded]


def test_a_limit_is_of_each_set_unless_it_says_how_many():
    loaded = load_sets(["sample:gsm8k", "sample:no_robots[:3]"], limit=2)
    assert [(each.name, len(each.ids)) for each in loaded] == [("gsm8k", 2), ("no_robots", 3)]


def test_the_examples_of_a_public_set_are_those_held_out_from_training():
    for name, kind in KINDS.items():
        if kind.published_as:
            assert kind.published_as == name
    from stovetop.tasks.evaluation_kinds import Kind
    from stovetop.tasks.problems import PROBLEMS

    gsm8k = KINDS["gsm8k"]
    assert isinstance(gsm8k, Kind)
    assert gsm8k.published is not None
    assert gsm8k.published.train == PROBLEMS["gsm8k"].test


def test_all_that_is_wrong_with_sets_is_said_at_once(tmp_path: Path):
    no_answer = write(tmp_path / "questions.jsonl", {"messages": CHAT["messages"][:1]})
    no_problem = write(tmp_path / "problems.jsonl", {"question": "q", "answer": "no result"})
    with pytest.raises(SeveralProblems) as refused:
        load_sets(
            ["gsm9k", str(tmp_path / "none.jsonl"), "labels", "mbpp+gsm8k", no_answer, f"gsm8k:{no_problem}", "mbpp*2"]
        )
    said = refused.value.problems
    assert [next(part for part in parts if part in text) for parts, text in zip(
        [["did you mean 'gsm8k'"], ["there is no such file"], ["labels is of rows of your own: labels:FILE.jsonl"],
         ["sets are not mixed"], ["it has no answer: 1"], ["its answer has no result: 1"], ["sets are not mixed"]],
        said, strict=True)]  # fmt: skip


def test_two_sets_of_one_name_and_two_examples_of_one_id_are_refused(tmp_path: Path):
    with pytest.raises(InvalidRequest, match=r"two sets have the same name.*'gsm8k'"):
        load_sets(["sample:gsm8k[:2]", "gsm8k:sample:gsm8k[:2]"])
    row = {"task_id": 1, "text": "t", "code": "c", "test_list": ["assert f()"]}
    with pytest.raises(InvalidRequest, match="two examples have the same id, '1'"):
        load_sets(["mbpp:" + write(tmp_path / "mbpp.jsonl", row, row)])


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'ifeval'"):
        load_sets(["ifevall"])


def test_what_a_set_is_scored_with_has_to_be_there(tmp_path: Path):
    row = {"text": "t", "code": "def f(): return 2", "test_list": ["assert f() == 2"]}
    programs = load_sets(["mbpp:" + write(tmp_path / "mbpp.jsonl", row)])
    with pytest.MonkeyPatch.context() as without:
        without.setattr(bubblewrap, "installed", list)
        with pytest.raises(SandboxUnavailable, match="pip install"), open_tools(programs):
            pass
    problem = parse_mbpp(row)
    assert isinstance(problem, ProgramProblem)
    with open_tools(programs) as tools:  # or the test is skipped
        assert tools.grade_program is not None
        assert tools.grade_program("def f(): return 2", problem)
        assert not tools.grade_program("def f(): return 3", problem)
    with (
        pytest.raises(InvalidRequest, match="pass one \\(--judge"),
        open_tools(load_sets(["pairwise:" + write(tmp_path / "chats.jsonl", CHAT)])),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ks": (2,)}, r"k in 1\.\.1, the number of samples of an example: 2"),
        ({"num_samples": 4, "temperature": 0.0}, "at temperature 0 all 4 samples"),
        ({"num_samples": 0}, "num_samples must be"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"ks": ()}, "ks must be"),
        ({"ks": (0,)}, "ks"),
    ],
)
def test_how_answers_are_asked_for_is_checked(options: dict[str, object], why: str):
    with pytest.raises(InvalidRequest, match=why):
        Asking(**options)  # pyright: ignore[reportArgumentType]  wrong on purpose


def test_a_chat_to_compare_with_ends_with_the_reference(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="the last of messages must be the assistant's"):
        load_sets(["pairwise:" + write(tmp_path / "chats.jsonl", {"messages": CHAT["messages"][:1]})])
