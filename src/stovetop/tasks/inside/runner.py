# pyright: basic, reportMatchNotExhaustive=false
"""Runs a program and calls its functions, in one process: `job.json` has the program and the calls. One line of JSON a
call goes to the pipe for answers, `{"is": value}` or `{"raised": words}`; the program's stdout is its own.
"""

import json
import os
import sys
import types
from typing import Any

ANSWER_FD = 3


def main(job: dict[str, Any]) -> None:
    dumps, write, leave = json.dumps, os.write, os._exit  # before the program may change them
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compile(job["program"], "program.py", "exec"), module.__dict__)
    except BaseException as error:
        write(ANSWER_FD, (dumps({"raised": f"{type(error).__name__}, as it was loaded"}) + "\n").encode())
        leave(1)
    for name, arguments, named in job["calls"]:
        try:
            values, by_name = decoded(arguments), {key: decoded(each) for key, each in named.items()}
            line = dumps({"is": plain_or_truth(function(module, name)(*values, **by_name))})
        except BaseException as error:
            line = dumps({"raised": f"{type(error).__name__}"})
        write(ANSWER_FD, (line + "\n").encode())
    leave(0)


def plain_or_truth(value: Any) -> Any:
    """Of what is no plain value, such as a match, only whether it is true: assertions may ask no more."""
    try:
        return encoded(value)
    except TypeError:
        return {"truth": bool(value)}


def function(module: types.ModuleType, name: str) -> Any:
    """Of the module, or a method of its class Solution."""
    return getattr(module.Solution(), name) if hasattr(module, "Solution") else getattr(module, name)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    from plain_data import decoded, encoded  # pyright: ignore  # it lies beside this file in the sandbox

    with open("job.json") as file:
        job = json.load(file)
    os.remove("job.json")
    main(job)
