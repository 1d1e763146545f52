"""What the extra `server` installs."""

import re

from missing import PROJECT
from stovetop.cli.serve import NEEDED


def test_serve_looks_for_every_package_of_its_extra_before_it_starts() -> None:
    extra = [re.split("[<>=]", requirement)[0] for requirement in PROJECT["optional-dependencies"]["server"]]
    assert sorted(name.removeprefix("google.") for name in NEEDED) == sorted(name.replace("-", "_") for name in extra)
