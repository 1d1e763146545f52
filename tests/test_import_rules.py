"""Who may import whom, read from the source; and what an import costs, seen in fresh processes."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import stovetop
from processes import run_python

PACKAGE = Path(stovetop.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# In reading order: a module may import what comes after it, that is, what stands on a line below or to its right.
LINES = [
    [
        "as_tinker",
        "__main__",
        "cli",
        "chat",
        "reports",
        "recipes",
        "fetch",
        "client_tokenizers",
    ],
    ["sweeps"],
    ["tasks", "kitchen"],
    ["evaluation", "distillation", "preference", "rl", "supervised", "evaluators"],
    [
        "runs",
        "stored_configs",
        "data_record",
        "retention",
        "checkpoints",
        "checkpoint_users",
        "run_folder",
        "tracking",
        "named_data",
        "datasets",
        "row_sources",
    ],
    ["server", "completers", "renderers", "tokenizer", "model_families", "hyperparams", "lr_schedules"],
    ["backends", "engine"],
    [
        "input_checks",
        "client",
        "arguments",
        "calls",
        "futures",
        "losses",
        "sdk_differences",
        "saved_states",
        "tokenizing",
        "types",
        "model_input",
        "tensors",
        "rest_types",
        "value",
        "concurrency",
        "seeds",
        "model_store",
        "hub",
        "gguf_files",
        "durable",
        "target_names",
        "tinker_paths",
        "checks",
        "rules",
        "extras",
        "errors",
    ],
]
ORDER = [unit for line in LINES for unit in line]

# Within the engine, likewise; but what is on one line of this table imports nothing of that line.
ENGINE_LINES = [
    ["engine"],
    ["adapters"],
    ["scheduler", "residency", "threads", "untried"],
    ["training", "sampling"],
    ["model"],
    ["files"],
    ["lora"],
    ["kernels"],
    ["ops", "machine", "containment"],
    ["counts"],
]

ROOT = "stovetop"  # the package itself, as in `import stovetop` or `from stovetop import AdamParams`
ROOT_MAY_IMPORT = {"client", "futures", "losses", "types", "errors"}
OPENS = ("client", "backends")  # ServiceClient(...) opens the provider that it is asked for, in the call
ONLY_IMPORTED_BY = {
    ROOT: {"cli", "recipes", "as_tinker"},
    "as_tinker": set(),
    "server": {"cli", "recipes"},
    "backends": {"cli", "recipes", "server", "client"},
    "engine": {"backends"},
}

TORCH_AT_TOP = ("engine/", "preference/losses.py", "distillation/losses.py")
HEAVY = {"torch", "transformers"}
OF_THE_SDK = "backends/remote/"  # which loads torch itself; `backends/remote/__init__.py` loads these when it is asked

DATASETS = [
    "deepcoder",
    "deepmath",
    "gsm8k",
    "helpsteer",
    "hhh",
    "humaneval",
    "ifeval",
    "math500",
    "mbpp",
    "mmlu",
    "no_robots",
    "openthoughts",
    "polaris",
    "ultrafeedback",
    "tulu",
]


class Import(NamedTuple):
    where: str  # "rl/types.py:12"
    module: str  # "stovetop.rl.types", "torch"
    names: tuple[str, ...]  # after "from module import"
    at_top: bool  # runs when the module is imported


# ---- the source ----------------------------------------------------------------------------------------------------


def test_every_module_has_its_place_in_the_table() -> None:
    assert {unit_of(path) for path in SOURCES} - {ROOT} <= set(ORDER)


def test_contributing_shows_the_table_without_what_is_still_to_come() -> None:
    text = (PACKAGE.parent.parent / "CONTRIBUTING.md").read_text()
    _, _, section = text.partition("## Who may import whom")
    table, _, _ = section.partition("Torch and transformers")
    lines = re.findall(r"^    \S.*(?:\n        .*)*", table, re.MULTILINE)
    there_are = {unit_of(path) for path in SOURCES}
    table = [[unit for unit in line if unit in there_are] for line in LINES]
    assert [re.split(r",\s+", line.strip()) for line in lines] == [*table, *ENGINE_LINES]


def test_a_module_imports_only_what_stands_below_it_or_to_its_right() -> None:
    wrong = [
        f"{found.where} imports {imported}"
        for path in SOURCES
        for found in imports_of(path)
        for imported in units_imported(found)
        if not may_import(unit_of(path), imported)
    ]
    assert wrong == []


def test_a_part_of_the_engine_imports_only_parts_on_lines_below_it() -> None:
    line_of = {part: number for number, line in enumerate(ENGINE_LINES) for part in line}
    wrong = [
        f"{found.where} imports engine.{imported}"
        for path in SOURCES
        if (importer := engine_part_of(path)) is not None
        for found in imports_of(path)
        for imported in engine_parts_imported(found)
        if imported != importer and line_of[imported] <= line_of[importer]
    ]
    assert wrong == []


def test_no_two_modules_of_the_engine_import_each_other_not_even_for_types() -> None:
    modules = {module_of(path): path for path in SOURCES if unit_of(path) == "engine"}
    imports = {name: imported_modules(path, set(modules)) for name, path in modules.items()}
    circles = [" -> ".join(circle) for name in imports if (circle := way(imports, name, name)) is not None]
    assert circles == []


def test_torch_and_transformers_stand_at_the_top_of_engine_modules_only() -> None:
    light = [path for path in SOURCES if not name_of(path).startswith(TORCH_AT_TOP)]
    found = [found for path in light for found in imports_of(path)]
    assert [f"{each.where} imports {each.module}" for each in found if each.at_top and root_of(each) in HEAVY] == []


def test_no_client_needs_a_provider_before_one_is_opened() -> None:
    importer, opened = OPENS
    found = imports_of(PACKAGE / f"{importer}.py")
    assert [each.at_top for each in found if opened in units_imported(each)] == [False]


def test_recipes_import_public_names_only() -> None:
    ours = [
        found for path in SOURCES if unit_of(path) == "recipes" for found in imports_of(path) if root_of(found) == ROOT
    ]
    names = [(found.where, name) for found in ours for name in (*found.module.split("."), *found.names)]
    assert [(where, name) for where, name in names if name.startswith("_")] == []


def test_recipes_and_the_kitchen_have_no_arithmetic_of_their_own() -> None:
    """What they compute is done by functions of the packages below; numpy counts tokens."""
    libraries = {
        unit: {
            root_of(found) for path in SOURCES if unit_of(path) == unit for found in imports_of(path) if found.at_top
        }
        for unit in ("recipes", "kitchen")
    }
    for unit in libraries:
        assert libraries[unit] - set(sys.stdlib_module_names) == {ROOT, "numpy"}


def test_only_tasks_and_recipes_name_a_dataset() -> None:
    shared = [path for path in SOURCES if unit_of(path) not in ("tasks", "recipes")]
    named = [(name_of(path), dataset) for path in shared for dataset in DATASETS if dataset in path.read_text().lower()]
    assert named == []


def test_an_import_is_seen_wherever_it_stands(tmp_path: Path) -> None:
    source = """
import torch.nn
if TYPE_CHECKING:
    from stovetop.rl import types
class A:
    from stovetop import engine, AdamParams
    def method(self):
        try:
            import stovetop.cli
        finally:
            pass
"""
    path = tmp_path / "module.py"
    path.write_text(source)
    found = imports_of(path)
    assert [(each.module, each.at_top) for each in found] == [
        ("torch.nn", True),
        ("stovetop.rl", False),
        ("stovetop", True),
        ("stovetop.cli", False),
    ]
    assert [units_imported(each) for each in found] == [set(), {"rl"}, {"engine", ROOT}, {"cli"}]


def engine_part_of(path: Path) -> str | None:
    """The subpackage, or module beside it, that a file of the engine belongs to."""
    parts = name_of(path).split("/")
    if parts[0] != "engine" or parts[1] == "__init__.py":
        return None
    return parts[1].removesuffix(".py")


def engine_parts_imported(found: Import) -> set[str]:
    pieces = found.module.split(".")
    if pieces[:2] != [ROOT, "engine"]:
        return set()
    return {pieces[2]} if len(pieces) > 2 else set(found.names)


def module_of(path: Path) -> str:
    name = name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"{ROOT}.{name}"


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Those of `known` that a file imports, `from package import module` included."""
    found = imports_of(path)
    names = {each.module for each in found} | {f"{each.module}.{name}" for each in found for name in each.names}
    return names & known - {module_of(path)}


def way(imports: dict[str, set[str]], start: str, end: str) -> list[str] | None:
    """Modules from `start` to `end`, each importing the next; None if there is no such way."""
    ways, seen = [[start]], set[str]()
    while ways:
        so_far = ways.pop()
        for name in sorted(imports[so_far[-1]]):
            if name == end:
                return [*so_far, name]
            if name not in seen:
                seen.add(name)
                ways.append([*so_far, name])
    return None


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def unit_of(path: Path) -> str:
    first = name_of(path).split("/")[0].removesuffix(".py")
    return ROOT if first == "__init__" else first


def root_of(found: Import) -> str:
    return found.module.split(".")[0]


@cache
def imports_of(path: Path) -> list[Import]:
    """Wherever they stand: those under `if TYPE_CHECKING` as `at_top` False, as those of functions."""
    return list(_imports(ast.parse(path.read_text()), name_of(path), at_top=True))


def _imports(node: ast.AST, file: str, *, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=aliases):
                yield from (Import(f"{file}:{child.lineno}", alias.name, (), at_top) for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                names = tuple(alias.name for alias in aliases)
                yield Import(f"{file}:{child.lineno}", module, names, at_top)
            case ast.ImportFrom():
                raise AssertionError(f"a relative import, which is not our style: {file}:{child.lineno}")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _imports(child, file, at_top=False)
            case _:
                yield from _imports(child, file, at_top=at_top)


def units_imported(found: Import) -> set[str]:
    """The parts of the package that an import reaches. `from stovetop import rl` reaches rl, not the package's root."""
    if root_of(found) != ROOT:
        return set()
    if found.module != ROOT:
        return {found.module.split(".")[1]}
    return {name if name in ORDER else ROOT for name in found.names or (ROOT,)}


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer not in ONLY_IMPORTED_BY.get(imported, {importer}):
        return False
    if importer == ROOT:
        return imported in ROOT_MAY_IMPORT
    return imported == ROOT or (importer, imported) == OPENS or ORDER.index(importer) < ORDER.index(imported)


# ---- fresh processes -----------------------------------------------------------------------------------------------


def test_modules_outside_the_engine_load_neither_torch_nor_transformers() -> None:
    slow = HEAVY | {"matplotlib", "rich", "tyro"}
    program = f"import sys, {modules(engine=False)}\nprint({slow} & set(sys.modules))"
    assert printed_by(program) == "set()\n"


@pytest.mark.slow  # an interpreter of its own that loads torch and transformers
def test_the_engine_needs_only_numpy_torch_transformers_and_safetensors() -> None:
    blocked = {"pydantic", "tyro", "rich", "httpx", "matplotlib"}
    printed_by(f"import sys; sys.modules |= dict.fromkeys({blocked})\nimport {modules(engine=True)}")


def modules(*, engine: bool) -> str:
    """Those of the engine, or else all that may not import torch at the top."""
    light = [
        path
        for path in SOURCES
        if not name_of(path).startswith((*TORCH_AT_TOP, OF_THE_SDK)) or name_of(path) == f"{OF_THE_SDK}__init__.py"
    ]
    paths = [path for path in SOURCES if unit_of(path) == "engine"] if engine else light
    names = [name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    return ", ".join(f"stovetop.{name}" for name in names if name != "__init__")


def printed_by(program: str) -> str:
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout
