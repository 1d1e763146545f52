"""The protocol's conformance list has 63 items, and each has a test of its number."""

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "protocol.md"


def test_each_item_of_the_conformance_list_has_a_test_that_bears_its_number() -> None:
    names = [
        name
        for file in HERE.glob("test_*.py")
        for name in re.findall(r"^def test_item_((?:\d+_and_)*\d+)_", file.read_text(), re.MULTILINE)
    ]
    tested = {int(number) for name in names for number in name.split("_and_")}
    assert tested == set(range(1, 64))


def test_only_these_items_may_be_what_is_not_there() -> None:
    """Each row of the page is of an item that is refused, or refused in part."""
    _, _, table = PAGE.read_text().partition("## What is not there")
    rows = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    assert {int(number) for number in rows} == {54, 56, 58, 59, 60, 61, 63}
