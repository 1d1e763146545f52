"""The commands that look at runs: runs, the table of those in a folder; report, what some of them have come to."""

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stovetop.cli.disk import show_disk_use
from stovetop.cli.runs import run_in
from stovetop.cli.tables import filled, print_table, text_width, watch_table
from stovetop.cli.words import Action
from stovetop.durable import write_file
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.reports import listing
from stovetop.reports.listing import list_runs, rows_of, run_folders
from stovetop.sweeps.running import is_sweep, read_sweep

if TYPE_CHECKING:
    from stovetop.reports.contents import Contents

WATCH_EVERY_S = 2.0


# ---- runs ------------------------------------------------------------------------------------------------------------


def runs(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop runs",
        description="The runs in a folder, and in those within it: how far each is, its last numbers, since when.",
        epilog="states: running; complete; stopped, that is interrupted or killed; failed, with the reason; damaged,\n"
        "with the file. A run that is not complete goes on with stovetop resume RUN.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", default="runs", help="where they are (default: runs)")
    parser.add_argument("--json", action="store_true", help="for programs: a list of objects")
    parser.add_argument("--watch", action="store_true", help="keep the table up to date, until Ctrl-C")
    parser.add_argument("--du", action="store_true", help="what they take of the disk, the largest first")
    options = parser.parse_args(words)
    if options.watch and (options.json or options.du):
        raise InvalidRequest("--json and --du are one answer, and --watch does not end; leave one of them out")
    folder = Path(options.folder)
    if not folder.is_dir():
        raise InvalidRequest(f"there is no such folder: {options.folder!r}; runs are made by `stovetop run RECIPE`")
    if options.du:
        return lambda: show_disk_use(run_folders(folder), as_json=options.json)
    return partial(_watch_runs, folder) if options.watch else partial(_show_runs, folder, as_json=options.json)


def _show_runs(folder: Path, *, as_json: bool) -> None:
    standings = list(list_runs(folder))
    if as_json:
        print(json.dumps([listing.as_json(standing) for standing in standings], indent=1))
    elif standings:
        print_table(rows_of(standings))
    else:
        print(f"no runs in {folder}")


def _watch_runs(folder: Path) -> None:
    with suppress(KeyboardInterrupt):  # which is how it is meant to end
        watch_table(lambda: rows_of(list(list_runs(folder))), WATCH_EVERY_S)


# ---- report ----------------------------------------------------------------------------------------------------------


class _Report(NamedTuple):
    """What was asked for."""

    folders: list[Path]
    form: str  # page, json, markdown
    to: Path | None  # where the page goes


def report(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop report",
        description="What runs have come to, as one HTML page that needs no other file and no network: config and\n"
        "differences, curves, evaluations, times, checkpoints, rollouts, warnings. Several runs are compared. Of\n"
        "a sweep: which values are best, and the curves of its best runs.",
        epilog="The page is written to RUN/report.html, or SWEEP/report.html; of several runs, to report.html in the\n"
        "current folder. A run may be running, failed or damaged: the page says where it stands. See\n"
        "docs/seeing_runs.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="+", help="folders of runs, such as runs/sl_basic; or of one sweep")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="for programs: print one object with all of it, or a list")
    forms.add_argument("--markdown", action="store_true", help="print it as Markdown, without plots")
    forms.add_argument("--to", metavar="FILE", type=Path, help="where to write the page")
    options = parser.parse_args(words)
    form = "json" if options.json else "markdown" if options.markdown else "page"
    if len(options.run) == 1 and is_sweep(sweep := Path(options.run[0])):
        from stovetop.cli.sweep_table import show_sweep  # which imports what no other command needs

        return partial(show_sweep, sweep, read_sweep(sweep), form, options.to)
    folders = [run_in(run) for run in options.run]
    if len(set(folders)) < len(folders):
        raise InvalidRequest(f"a run is named twice: {', '.join(options.run)}")
    return partial(_report, _Report(folders, form, options.to))


def _report(asked: _Report) -> None:
    from stovetop.reports import texts
    from stovetop.reports.contents import contents_of

    found = [contents_of(folder) for folder in asked.folders]
    match asked.form:
        case "json":
            objects = [texts.json_of(run) for run in found]
            print(json.dumps(objects[0] if len(objects) == 1 else objects, indent=1))
        case "markdown":
            print(texts.markdown_of(found), end="")
        case _:
            from stovetop.reports.page import page_of

            to = (asked.to or texts.page_place(asked.folders)).expanduser().resolve()
            write_file(to, page_of(found, to).encode())
            for run in found:
                for each in (run, *run.phases):
                    _show(each)
            print(f"the page: {to}")
    if (damage := texts.words_of_damage(found)) is not None:
        raise StovetopError(damage)


def _show(run: "Contents") -> None:
    """In short, for a terminal."""
    from stovetop.reports.texts import summary_of, table_of

    print(summary_of(run))
    changed, same = table_of(run)
    if changed:
        print_table(changed)
    if same:
        print(*filled(f"the same in every row: {', '.join(same)}", "", text_width()), sep="\n")
    for checkpoint in run.checkpoints:
        print(f"checkpoint {checkpoint.name}: {checkpoint.state_path or checkpoint.sampler_path}")
    if run.files:
        print(f"in its folder: {', '.join(run.files)}")
    if (command := run.go_on()) is not None:
        print(f"to go on: {command}")
    print()
