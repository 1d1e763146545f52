"""The rollouts of a run as rows, all of them: a file for each step, and one for each evaluation, in the run's folder.

    rollouts/000012_train.parquet    those that step 12 trained on
    rollouts/000012_eval_test.parquet    those of the evaluator "test", played before it

They are Parquet where pyarrow is installed (extra `data`), else JSON lines; both are read alike, by DuckDB. A file is
there whole or not at all, and a step that runs again writes its file again: so no rollout is there twice. What a run
that goes on runs again is removed first, by `drop_rollouts`, which `Run.start_at` calls.

Shape suffixes: `N` tokens of a rollout, observed and sampled, in order; `A` those that were sampled.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from urllib.parse import quote

from stovetop.durable import clear_leftovers, make_folders, write_file, writing
from stovetop.errors import InvalidRequest, StovetopError, UnknownName
from stovetop.extras import import_extra, is_installed
from stovetop.tracking.events import encode_number

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ROLLOUTS_FOLDER, PAGES_FOLDER = "rollouts", "iteration_{step:06d}"
TRAIN, EVAL = "train", "eval_"  # the split of a step, and how that of an evaluator begins
_FILE = re.compile(r"(?P<step>\d{6,})_.+\.(parquet|jsonl)")
_PAGES = re.compile(r"iteration_(?P<step>\d{6,})")

Order = Literal["first", "best", "worst", "longest"]


class Kind(IntEnum):
    """What a token of a rollout is."""

    OBSERVED = 0
    TRAINED = 1  # sampled, and trained on
    SAMPLED = 2  # sampled, and not trained on
    ANEW = 3  # no token: here an observation begins that does not go on from what was before it


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout."""

    split: str  # "train", or "eval_" and the name of the evaluator
    step: int
    group_idx: int  # of the step
    traj_idx: int  # of the group
    prompt: str  # a digest of the first observation: the same for the same prompt, in every step
    tags: list[str]
    policy_step: int | None  # the policy that played was trained this many steps; None: not known
    reward: float  # of the steps and of the group, together
    final_reward: float  # what the group added
    advantage: float | None  # mean over the tokens that were trained on; None where none was
    stop_reason: str
    num_turns: int
    num_prompt_tokens: int  # of the first observation
    num_tokens: int  # sampled
    metrics: dict[str, float]  # means over its turns, and what the group said
    prompt_text: str  # the first observation
    answer: str  # all after it: what the policy said, and what it was shown in reply
    chat: list[dict[str, Any]]  # the same as messages
    turns: list[dict[str, Any]]  # num_observed, num_sampled, reward, metrics, logs, stop_reason, trainable
    notes: list[Any]  # what the environment logged by `logtree`, as `html_tree.to_data` has it
    pieces: list[str]  # pieces_N: the text of each token; "" before the last token of a character
    kinds: list[int]  # kinds_N: see Kind
    token_ids: list[int]  # token_ids_N; -1 where there is none
    logprobs: list[float | None]  # logprobs_A of the sampler, at the temperature that it sampled with
    trained_logprobs: list[float | None]  # of the trainer before the update; empty where nothing was trained on
    advantages: list[float | None]  # likewise, with every penalty


COLUMNS = {
    "split": "VARCHAR", "step": "BIGINT", "group_idx": "BIGINT", "traj_idx": "BIGINT", "prompt": "VARCHAR",
    "tags": "VARCHAR[]", "policy_step": "BIGINT", "reward": "DOUBLE", "final_reward": "DOUBLE", "advantage": "DOUBLE",
    "stop_reason": "VARCHAR", "num_turns": "BIGINT", "num_prompt_tokens": "BIGINT", "num_tokens": "BIGINT",
    "metrics": "MAP(VARCHAR, DOUBLE)", "prompt_text": "VARCHAR", "answer": "VARCHAR", "chat": "JSON", "turns": "JSON",
    "notes": "JSON", "pieces": "VARCHAR[]", "kinds": "TINYINT[]", "token_ids": "INTEGER[]", "logprobs": "FLOAT[]",
    "trained_logprobs": "FLOAT[]", "advantages": "FLOAT[]",
}  # fmt: skip
"""The columns of a row, and their types as DuckDB names them."""
_JSON = [name for name, kind in COLUMNS.items() if kind == "JSON"]
_LARGE = {name for name, kind in COLUMNS.items() if kind in ("JSON", "TINYINT[]", "INTEGER[]", "FLOAT[]")} | {"pieces"}
FACTS = [name for name in COLUMNS if name not in _LARGE]  # what a list of many rollouts shows
_KEY = "file, split, step, group_idx, traj_idx"


# ---- writing ---------------------------------------------------------------------------------------------------------


def eval_split(evaluator: str) -> str:
    """What the rollouts of an evaluator of this name are kept as, and how their page is called."""
    return f"{EVAL}{quote(evaluator, safe='')}"


def write_rollouts(run: Path, rows: Sequence[RolloutRow]) -> Path:
    """The file of a step's rollouts, or of an evaluation's: they are of one split and one step."""
    folder, stem = run / ROLLOUTS_FOLDER, f"{rows[0].step:06d}_{rows[0].split}"
    with writing(folder):
        make_folders(folder)
    parquet, lines = folder / f"{stem}.parquet", folder / f"{stem}.jsonl"
    if is_installed("pyarrow"):
        write_file(parquet, _as_parquet(rows))
        lines.unlink(missing_ok=True)
        return parquet
    parquet.unlink(missing_ok=True)
    write_file(lines, as_json_lines(rows))
    return lines


def as_json_lines(rows: Sequence[RolloutRow]) -> bytes:
    """A line for each rollout, with all that is known of it."""
    return b"".join(json.dumps(_as_json(row), allow_nan=False).encode() + b"\n" for row in rows)


def _as_json(row: RolloutRow) -> dict[str, Any]:
    metrics = {name: encode_number(value) for name, value in row.metrics.items()}
    return {**{name: getattr(row, name) for name in COLUMNS}, "metrics": metrics}


def _as_parquet(rows: Sequence[RolloutRow]) -> bytes:
    pa, pq = (import_extra(module, "data") for module in ("pyarrow", "pyarrow.parquet"))
    types: dict[str, Any] = {
        "VARCHAR": pa.string(), "JSON": pa.string(), "BIGINT": pa.int64(), "DOUBLE": pa.float64(),
        "MAP(VARCHAR, DOUBLE)": pa.map_(pa.string(), pa.float64()), "VARCHAR[]": pa.list_(pa.string()),
        "TINYINT[]": pa.list_(pa.int8()), "INTEGER[]": pa.list_(pa.int32()), "FLOAT[]": pa.list_(pa.float32()),
    }  # fmt: skip
    arrays: dict[str, Any] = {}
    for name, kind in COLUMNS.items():
        values: list[Any] = [getattr(row, name) for row in rows]
        if kind == "JSON":
            values = [json.dumps(value, allow_nan=False) for value in values]
        elif kind.startswith("MAP"):
            values = [list(value.items()) for value in values]
        arrays[name] = pa.array(values, types[kind])
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays), buffer, compression="zstd")
    return buffer.getvalue().to_pybytes()


def drop_rollouts(run: Path, step: int) -> None:
    """Removes the rollouts of this step and of all after it, and their pages: these steps run again."""
    folder = run / ROLLOUTS_FOLDER
    if not folder.is_dir():
        return
    clear_leftovers(folder)
    with writing(folder):
        for file in folder.iterdir():
            if (found := _FILE.fullmatch(file.name)) and int(found["step"]) >= step:
                file.unlink()
        for pages in run.iterdir():
            if (found := _PAGES.fullmatch(pages.name)) and int(found["step"]) >= step:
                for name in (*pages.glob("train.*"), *pages.glob(f"{EVAL}*.*")):
                    name.unlink()


# ---- reading ---------------------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """A rollout in short: the columns FACTS, by name, and the file that it is in."""

    file: str
    values: Mapping[str, Any]


class Found(NamedTuple):
    """Rollouts that were looked for."""

    rollouts: list[Facts]  # as many as were asked for
    num_found: int  # of all


def rollout_files(run: Path) -> list[Path]:
    """Those of a run, and of the runs that lie in it as its phases, in order."""
    files: dict[Path, Path] = {}  # where a crash has left a step in both formats, the Parquet file
    for pattern in (f"{ROLLOUTS_FOLDER}/*", f"*/{ROLLOUTS_FOLDER}/*"):
        for file in sorted(run.glob(pattern)):
            if _FILE.fullmatch(file.name):
                files[file.with_suffix("")] = file
    return sorted(files.values(), key=lambda file: (file.parent, file.name))


def check_condition(where: str) -> None:
    """Refuses what is no condition on the columns of RolloutRow. No file is read: a condition may still fail on what is
    in one, as `answer::INT > 3` does on a word."""
    nothing = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items())
    with _opened(()) as database:
        _asked(database, f"SELECT true FROM (SELECT {nothing}) WHERE {_condition(where)}", {}, where)


def _condition(where: str) -> str:
    return f"({where}\n)"  # a line of its own: it may end in a comment


def find_rollouts(
    run: Path,
    *,
    where: str = "",
    grep: str = "",
    split: str = "",
    step: int | None = None,
    prompt: str = "",
    order: Order = "first",
    limit: int | None = None,
) -> Found:
    """The rollouts of a run that fit all of this: `where`, a condition of SQL on the columns of RolloutRow; `grep`, a
    text that the prompt or the answer has, upper and lower case told apart; the beginning of a `prompt`'s digest.
    `order` says which come first."""
    files = [file for file in rollout_files(run) if step is None or file.name.startswith(f"{step:06d}_")]
    if not files:
        return Found([], 0)
    conditions = {
        _condition(where): where,
        "(contains(prompt_text, $grep) OR contains(answer, $grep))": grep,
        "split = $split": split,
        "starts_with(prompt, $prompt)": prompt,
    }
    wanted = {"grep": grep, "split": split, "prompt": prompt}
    told = [condition for condition, value in conditions.items() if value]
    with _opened(files) as database:
        source = f"{_source(files)} WHERE {' AND '.join(told) or 'true'}"
        values = {name: value for name, value in wanted.items() if value}
        select = ", ".join(FACTS)
        query = f"SELECT file, {select}, count(*) OVER () FROM {source} ORDER BY {_order(order)} LIMIT {limit or 'ALL'}"
        rows = _asked(database, query, values, where)
    facts = [Facts(row[0], dict(zip(FACTS, row[1:-1], strict=True))) for row in rows]
    return Found(facts, rows[0][-1] if rows else 0)


def read_rollouts(found: Sequence[Facts]) -> list[RolloutRow]:
    """All that is known of these rollouts, in the same order."""
    if not found:
        return []
    files = [Path(name) for name in dict.fromkeys(each.file for each in found)]
    wanted = {
        "files": [each.file for each in found],
        "groups": [each.values["group_idx"] for each in found],
        "members": [each.values["traj_idx"] for each in found],
        "places": list(range(len(found))),
    }
    keys = {"files": "file", "groups": "group_idx", "members": "traj_idx", "places": "place"}
    unnested = ", ".join(f"unnest(${name}) AS {column}" for name, column in keys.items())
    joined = f"{_source(files)} JOIN (SELECT {unnested}) USING (file, group_idx, traj_idx)"
    with _opened(files) as database:
        rows = _asked(database, f"SELECT {', '.join(COLUMNS)} FROM {joined} ORDER BY place", wanted)
    named_rows = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return [RolloutRow(**{**each, **{name: json.loads(each[name]) for name in _JSON}}) for each in named_rows]


def last_rollouts(run: Path, limit: int = 32) -> list[RolloutRow]:
    """Those of the last step that has any, in the order of their groups."""
    trained = [file for file in rollout_files(run) if f"_{TRAIN}." in file.name]
    if not trained:
        return []
    with _opened(trained[-1:]) as database:
        query = f"SELECT file, {', '.join(FACTS)} FROM {_source(trained[-1:])} ORDER BY {_order('first')} LIMIT {limit}"
        rows = _asked(database, query, {})
    return read_rollouts([Facts(row[0], dict(zip(FACTS, row[1:], strict=True))) for row in rows])


def _order(order: Order) -> str:
    orders = {"first": "", "best": "reward DESC, ", "worst": "reward, ", "longest": "num_tokens DESC, "}
    if order not in orders:
        raise UnknownName("order", order, get_args(Order))
    return orders[order] + _KEY


def _opened(files: Iterable[Path]) -> "DuckDBPyConnection":
    """It reads these, and whatever a condition says, no other file and no network."""
    import duckdb

    database = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    folders = sorted({str(file.parent) for file in files})
    database.execute(f"SET allowed_directories = [{', '.join(map(_quoted, folders))}]")
    database.execute("SET enable_external_access = false")
    return database


def _quoted(text: str) -> str:
    """As SQL has it."""
    return "'" + text.replace("'", "''") + "'"


def _source(files: Sequence[Path]) -> str:
    """A subquery with the rows of all files, and the file of each."""
    names = ", ".join(COLUMNS)
    kinds = ", ".join(f"{name}: '{kind}'" for name, kind in COLUMNS.items())
    options = f"format = 'newline_delimited', columns = {{{{{kinds}}}}}"
    readers = {
        ".parquet": "read_parquet({}, filename = true)",
        ".jsonl": f"read_json({{}}, filename = true, {options})",
    }
    parts: list[str] = []
    for suffix, reader in readers.items():
        if listed := [_quoted(str(file)) for file in files if file.suffix == suffix]:
            parts.append(f"SELECT filename AS file, {names} FROM {reader.format('[' + ', '.join(listed) + ']')}")
    return f"({' UNION ALL '.join(parts)})"


def _asked(
    database: "DuckDBPyConnection", query: str, values: Mapping[str, Any], where: str = ""
) -> list[tuple[Any, ...]]:
    import duckdb

    try:
        if len(database.extract_statements(query)) != 1:
            raise InvalidRequest("a condition on rollouts is one expression, without a semicolon")
        return database.execute(query, dict(values)).fetchall()
    except duckdb.Error as error:
        said = str(error).partition("\n")[0]
        if not where:
            raise StovetopError(f"the rollouts cannot be read; remove the file that is damaged: {said}") from error
        raise InvalidRequest(
            f"the rollouts cannot be asked this ({said}); a condition of SQL may use: {', '.join(FACTS)}. Metrics are "
            f"metrics['correct']; texts are in single quotes"
        ) from error
