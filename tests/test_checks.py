"""Rules of fields and arguments, and who holds values to them. What each field of the package may not hold is listed in
backends/test_wrong_input.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from stovetop.checks import check, checked, collecting, take, unchecked
from stovetop.distillation.losses import GeneralizedJSD
from stovetop.errors import InvalidRequest, SeveralProblems, UnknownName
from stovetop.losses import parse_loss
from stovetop.preference import losses as preference
from stovetop.rl.kl import kl_penalty
from stovetop.rl.rollouts import MinViableGroup, RetryOnFailure
from stovetop.rules import Whole, number, rule_of, shown
from stovetop.types import SampledSequence


@dataclass(frozen=True, slots=True)
class Parameters:
    rank: Annotated[int, Whole(1, 8)] = 4
    share: Annotated[float, number(above=0, at_most=1)] = 1.0
    kind: Literal["a", "b"] = "a"
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check(self)


def test_each_field_has_one_form() -> None:
    made = Parameters(rank=np.int32(3), share=1, names=("x",))
    assert [type(field) for field in (made.rank, made.share, made.names)] == [int, float, list]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 9}, "Parameters.rank must be an integer from 1 to 8: 9"),
        ({"rank": 2.0}, r"Parameters.rank must be an integer from 1 to 8: 2.0 \(float\)"),
        ({"share": 0.0}, "Parameters.share must be a finite number above 0 and at most 1: 0.0"),
        ({"share": float("nan")}, "Parameters.share must be .*: nan"),
        ({"kind": "c"}, "Parameters.kind must be 'a' or 'b': 'c'"),
        ({"names": ["x", 5]}, r"Parameters.names\[1\] must be a string: 5"),
        ({"names": "x"}, "Parameters.names must be a list, each a string, or None: 'x'"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_field_range_and_value(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Parameters(**wrong)


def test_an_integer_beyond_64_bits_is_refused_with_the_largest_that_is_taken() -> None:
    assert take(Whole(1), 2**63 - 1, "it") == 2**63 - 1
    with pytest.raises(InvalidRequest, match=rf"it must be an integer of at least 1 \(at most {2**63 - 1}\): {2**63}"):
        take(Whole(1), 2**63, "it")


def test_a_default_that_breaks_its_own_rule_is_found_at_the_first_use() -> None:
    @dataclass(frozen=True)
    class Wrong:
        rank: Annotated[int, Whole(1)] = 0

    with pytest.raises(InvalidRequest, match=r"the default of Wrong.rank must be an integer of at least 1: 0"):
        check(Wrong())


def test_every_refusal_of_a_checked_call_begins_with_its_name() -> None:
    @checked
    def draw(count: Annotated[int, Whole(1)], name: str = "x") -> int:
        if name == "y":
            raise InvalidRequest("this name is taken: 'y'")
        return count

    assert draw(np.int64(2)) == 2
    for call, message in (
        (lambda: draw(0), "draw: count must be an integer of at least 1: 0"),
        (lambda: draw(1, name="y"), "draw: this name is taken: 'y'"),
        (lambda: draw(1, nam="y"), "draw: unknown argument 'nam'; did you mean 'name'"),
        (lambda: draw(), "draw: missing a required argument: 'count'; the arguments are: count, name"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            call()


def test_an_annotation_without_a_rule_is_a_fault_of_ours() -> None:
    with pytest.raises(TypeError, match="no rule is known"):
        rule_of(set[int])


def test_a_value_is_shown_shortly_and_with_its_type() -> None:
    assert shown([]) == "[] (an empty list)"
    assert len(shown("x" * 1000)) < 100
    with pytest.raises(InvalidRequest, match=r"it must be an integer of at least 1: '1' \(str\)"):
        take(Whole(1), "1", "it")


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: preference.DPO(beta=wrong),
        lambda wrong: preference.SimPO(gamma=wrong),
        lambda wrong: preference.ORPO(lam=wrong),
        lambda wrong: preference.RobustDPO(label_smoothing=wrong),
        lambda wrong: GeneralizedJSD(beta=wrong),
        lambda wrong: RetryOnFailure(max_retries=wrong),
        lambda wrong: RetryOnFailure(timeout_s=wrong),
        lambda wrong: MinViableGroup(min_successful=wrong),
        lambda wrong: kl_penalty([[1.0]], [[1.0]], wrong),
        lambda wrong: kl_penalty([[1.0]], [[1.0]], 0.1, discount=wrong),
    ],
)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "1", True, [1]])
def test_numbers_of_the_algorithms_are_numbers(call: Callable[[Any], object], wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="must be"):
        call(wrong)


def test_a_value_of_what_was_just_computed_is_the_same_value_and_its_fields_are_not_looked_at() -> None:
    tokens = [1, 2]
    made = unchecked(
        SampledSequence, stop_reason="stop", tokens=tokens, logprobs=[-1.0, -2.0], sequence_id="a", topk_logprobs=None
    )
    assert made == SampledSequence("stop", [1, 2], [-1.0, -2.0], "a")
    assert made.tokens is tokens  # a check would have made a copy of it


def test_all_fields_that_break_their_rule_are_named_at_once() -> None:
    with pytest.raises(SeveralProblems) as caught:
        Parameters(rank=0, share=float("nan"))
    assert caught.value.problems == (
        "Parameters.rank must be an integer from 1 to 8: 0",
        "Parameters.share must be a finite number above 0 and at most 1: nan (float)",
    )
    assert str(caught.value).startswith("2 things are wrong:\n  - Parameters.rank must be")


def _refused(*words: str) -> None:
    with collecting() as problem:
        for word in words:
            with problem:
                raise InvalidRequest(f"{word} is wrong")


def _checked_in_turn(*checks: Callable[[], object]) -> None:
    with collecting() as problem:
        for each in checks:
            with problem:
                each()


def test_checks_that_are_collected_are_all_made_and_each_problem_is_said_once() -> None:
    made: list[str] = []
    with pytest.raises(SeveralProblems) as caught:
        _checked_in_turn(lambda: _refused("a", "b"), lambda: _refused("b"), lambda: made.append("c"))
    assert made == ["c"]
    assert caught.value.problems == ("a is wrong", "b is wrong")


def test_one_problem_that_is_collected_is_raised_as_it_was() -> None:
    with pytest.raises(UnknownName):
        _checked_in_turn(lambda: take(Whole(0), 1, "x"), lambda: parse_loss("nope"))


def test_what_is_no_mistake_of_the_user_is_not_collected() -> None:
    with pytest.raises(ZeroDivisionError):
        _checked_in_turn(lambda: 1 // 0)
