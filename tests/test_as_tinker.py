"""`import tinker` gives this package, in a process of its own."""

from pathlib import Path

import pytest

from processes import run_python


def test_programs_for_the_sdk_find_what_they_import() -> None:
    program = """
import stovetop.as_tinker, stovetop
import tinker
import tinker.types.tensor_data
from tinker import types, AdminClient
from tinker.types import AuditLogEntry, LossFnType
from tinker.types.tensor_data import TensorData
from tinker.types.loss_fn_type import LossFnType as of_its_file
from tinker.types.model_input_chunk import ModelInputChunk
from tinker.lib.public_interfaces import APIFuture
from tinker.lib.public_interfaces.api_future import APIFuture as same
from tinker.lib.public_interfaces.rest_client import RestClient
assert tinker.ServiceClient is stovetop.ServiceClient and tinker.types.TensorData is TensorData is stovetop.TensorData
assert APIFuture is same is stovetop.APIFuture and RestClient is stovetop.RestClient
assert issubclass(stovetop.InvalidRequest, tinker.BadRequestError)
for make in (AdminClient, tinker.DmelChunk, types.ImageAssetPointerChunk):
    try:
        make(1, 2, three=3)
    except tinker.TinkerError as error:
        print(error)
try:
    tinker.Datun
except AttributeError as error:
    print(error)
import stovetop.as_tinker  # twice is once
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "tinker.AdminClient is not offered: there are no accounts here",
        "tinker.DmelChunk is not offered: no model here hears",
        "tinker.ImageAssetPointerChunk is not offered: an image is sent as its bytes, in an ImageChunk",
        "stovetop has no tinker.Datun",
    ]


@pytest.mark.slow
def test_where_the_sdk_has_been_imported_nothing_is_replaced() -> None:
    __import__("tinker")  # skipped where it is missing
    done = run_python("-c", "import tinker, stovetop.as_tinker")
    assert done.returncode == 1
    assert "the Tinker SDK has been imported already; import stovetop.as_tinker before it" in done.stderr


def test_a_program_runs_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, tinker\nprint(tinker.ServiceClient.__module__, __name__, sys.argv[1:])\n")
    done = run_python("-m", "stovetop.as_tinker", str(script), "--steps", "3")
    assert done.stdout == "stovetop.client __main__ ['--steps', '3']\n", done.stderr
    (tmp_path / "a_module.py").write_text(script.read_text())
    script.write_text("import a_module")
    done = run_python("-m", "stovetop.as_tinker", str(script))
    assert done.stdout == "stovetop.client a_module []\n", done.stderr  # it finds what lies beside it
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = ['-m', 'a_module', 'x=1']\n"
    program += "import runpy; runpy.run_module('stovetop.as_tinker', run_name='__main__', alter_sys=True)"
    done = run_python("-c", program)
    assert done.stdout == "stovetop.client __main__ ['x=1']\n", done.stderr
    assert "usage: python -m stovetop.as_tinker" in run_python("-m", "stovetop.as_tinker").stderr
