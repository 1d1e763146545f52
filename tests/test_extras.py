"""What is said where a package of an extra is missing, and where one is there and does not work."""

import sys
from pathlib import Path

import pytest

from stovetop.errors import MissingExtra
from stovetop.extras import import_extra, require_extra


@pytest.mark.parametrize(
    ("module", "package"),
    [("math_verify", "math-verify"), ("pyarrow.parquet", "pyarrow"), ("google.protobuf", "protobuf")],
)
def test_a_missing_package_is_named_as_one_installs_it_with_the_extra_that_brings_it(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for asking in (lambda: import_extra(module, "some", "to work,"), lambda: require_extra("some", "re", module)):
        with pytest.raises(MissingExtra, match=rf"{package} is .*not installed.*pip install 'stovetop\[some\]'"):
            asking()


def test_a_module_within_a_package_that_is_missing_is_missing() -> None:
    with pytest.raises(MissingExtra, match="nothing-of-the-kind is not installed"):
        require_extra("some", "nothing_of_the_kind.inside")


def test_a_package_that_is_there_and_needs_one_that_is_not_names_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import more_of_it.inside")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra, match="more-of-it is not installed"):
        import_extra("needs_more", "some")


def test_packages_that_do_not_fit_together_are_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "does_not_fit.py").write_text("from re import what_an_older_version_had")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="what_an_older_version_had") as failed:
        import_extra("does_not_fit", "some")
    assert not isinstance(failed.value, MissingExtra)
