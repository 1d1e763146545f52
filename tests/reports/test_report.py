"""The report of runs in every state, as a page, as Markdown and as JSON."""

import json
import logging
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from costly import slow_but
from reports.made_runs import COLUMNS, Config, log_steps, make_run
from rollout_rows import row
from stovetop.cli import main
from stovetop.errors import StovetopError
from stovetop.reports.contents import contents_of
from stovetop.reports.page import page_of
from stovetop.reports.texts import markdown_of
from stovetop.reports.views import MOST_EVALUATIONS, evaluation_steps, labels_of
from stovetop.run_folder import CHECKPOINTS_FILE, EVENTS_FILE, LOCK_FILE, METRICS_FILE
from stovetop.runs import open_run
from stovetop.tracking.rollout_rows import write_rollouts


class Page(HTMLParser):
    """The text of a page, and how many elements of a kind there are."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def report_of(*paths: Path) -> Page:
    return Page(page_of([contents_of(path) for path in paths], paths[0] / "report.html"))


def test_a_page_has_what_was_run_its_curves_evaluations_times_and_checkpoints(tmp_path: Path) -> None:
    page = report_of(make_run(tmp_path / "run", 4))
    for words in ("complete", "4 of 4", "learning_rate", "0.001", "0.2000 ± 0.05", "time/train", "80.0 %", "final"):
        assert words in page.text, words
    assert page.tags.count("figure") == 3  # loss, accuracy, the chart of the last steps
    assert ("class", "bar") in page.attributes
    assert "The same in every row: learning_rate=0.001000" in page.text


def test_a_page_needs_no_network_and_holds_no_script_but_its_own(tmp_path: Path) -> None:
    page = page_of([contents_of(make_run(tmp_path / "run"))], tmp_path / "report.html")
    found = Page(page)
    assert found.tags.count("script") == 1
    assert not [value for name, value in found.attributes if name in ("src", "style") or name.startswith("on")]
    links = [value or "" for name, value in found.attributes if name == "href"]
    assert all(link.startswith("#") for link in links)
    assert "default-src 'none'" in page


def test_several_runs_stand_in_one_plot_and_what_differs_is_told(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "b", learning_rate=0.1)]
    page = report_of(*paths)
    assert page.tags.count("figure") == 3 + 1 + 1  # of the rate too, which differs; and a chart of each
    lines = [value for name, value in page.attributes if name == "data-label" and value in ("a", "b")]
    assert lines.count("a") == lines.count("b") >= 3
    assert "what differs field a b learning_rate 0.001 0.1" in page.text
    assert "0.2000 ± 0.05 (step 2)" in page.text


@pytest.mark.parametrize("num_rows", [0, 1])
def test_an_empty_run_and_one_of_one_step_have_a_report(tmp_path: Path, num_rows: int) -> None:
    path = make_run(tmp_path / "run", num_rows)
    page = report_of(path)
    assert f"{num_rows} of 4" in page.text
    assert ("no step was logged" in page.text) == (num_rows == 0)
    assert "## run" in markdown_of([contents_of(path)])


def test_a_failed_run_tells_why_what_was_logged_and_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(StovetopError):
        make_run(tmp_path / "run", 2, fails=StovetopError("card fell off"))
    for words in ("failed", "card fell off", "ERROR", "Traceback"):
        assert words in report_of(tmp_path / "run").text, words


def test_a_run_that_still_runs_has_a_report(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with open_run(path, Config(log_path=str(path)), console=False, columns=COLUMNS) as run:
        run.start_at(0, 10)
        log_steps(run, range(2))
        page = report_of(path)
    for words in ("running", "2 of 10", "4 s left"):
        assert words in page.text, words


@pytest.mark.parametrize(
    "file", slow_but(2, [METRICS_FILE, "config.json", EVENTS_FILE, CHECKPOINTS_FILE, "workflow.json"])
)
def test_a_damaged_run_has_a_report_that_names_the_file_and_shows_the_rest(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run")
    (path / file).write_bytes(b"words\n")
    assert main(["report", str(path)]) == 1
    said = capsys.readouterr()
    assert str(path / file) in said.err
    page = Page((path / "report.html").read_text())
    assert f"{path / file}" in page.text
    assert ("0.2000 ± 0.05" in page.text) == (file != METRICS_FILE)
    assert main(["report", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["damage"]


def test_a_crash_between_any_two_appends_leaves_a_run_whose_report_says_where_it_stands(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", 3, num_steps=3)
    (path / LOCK_FILE).unlink()  # which names this process, and that lives
    whole = {name: (path / name).read_bytes() for name in (METRICS_FILE, EVENTS_FILE, CHECKPOINTS_FILE)}
    lines = {name: data.splitlines(keepends=True) for name, data in whole.items()}
    for name, of_file in lines.items():
        for num in range(len(of_file)):
            for torn in (b"", of_file[num][: len(of_file[num]) // 2]):
                (path / name).write_bytes(b"".join(of_file[:num]) + torn)
                found = contents_of(path)
                assert found.damage == []
                assert found.standing.state in ("complete", "stopped"), (name, num, found.standing)
                assert found.standing.num_steps == 3
                assert found.num_rows == (num if name == METRICS_FILE else 3)
        (path / name).write_bytes(whole[name])


EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"' onload=alert(1) </style></svg>\u202e]]>&lt;"


def test_nothing_that_a_run_has_written_is_read_as_html(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with (
        pytest.raises(ValueError, match="alert"),
        open_run(path, Config(log_path=str(path), dataset=EVIL), console=False, columns=[EVIL]) as run,
    ):
        spoil(run)
    html = page_of([contents_of(path)], path / "report.html")
    page = Page(html)
    assert page.tags.count("script") == 1
    assert page.tags.count("style") == 1
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "\u202e" not in html
    assert page.text.count("<script>alert(1)</script>") > 5
    for link in re.findall(r'href="([^"]*)"', html):
        assert not link.startswith("javascript")


def spoil(run: "open_run") -> None:  # pyright: ignore[reportGeneralTypeIssues]  a Run
    run.start_at(0, 2)
    run.log_metrics({EVIL: 1.0, f"test/{EVIL}": 1.0, "time/a": 1.0}, 0)
    run.log_metrics({EVIL: 2.0, f"test/{EVIL}": 0.5, "time/a": 1.0}, 1)
    for name in ("stage.start", "stage.stop"):
        run.emit(name, step=0, stage=EVIL)
    run.table(EVIL, [EVIL, "b"], [[EVIL, "[x](javascript:alert(1)) ![x](http://x/y.png)"]])
    logging.getLogger("stovetop.test").warning(EVIL)
    raise ValueError(EVIL)


def test_warnings_are_counted_and_what_only_informs_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with open_run(path, Config(log_path=str(path)), console=False):
        for _ in range(3):
            logging.getLogger("stovetop.test").warning("a row\nof two lines")
        logging.getLogger("stovetop.test").info("hello")
    [said] = contents_of(path).said
    assert (said.level, said.logger, said.text, said.num) == ("WARNING", "stovetop.test", "a row\nof two lines", 3)


def test_a_long_table_of_evaluations_keeps_the_first_and_the_last(tmp_path: Path) -> None:
    found = contents_of(make_run(tmp_path / "run", 100, num_steps=100))
    steps, num = evaluation_steps(found.evaluations)
    assert (len(steps), num, steps[0], steps[-1]) == (MOST_EVALUATIONS, 50, 0, 98)


def test_a_mean_reward_has_the_error_of_its_spread_over_episodes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with open_run(path, Config(log_path=str(path)), console=False) as run:
        for step, mean in enumerate((0.25, 0.5)):
            of_reward = {"test/env/all/reward/total": mean, "test/env/all/reward/std": 0.4}
            run.log_metrics({**of_reward, "test/env/all/total_episodes": 64}, step)
    page = report_of(path)
    assert "0.5000 ± 0.05" in page.text
    assert "The same each time: test/env/all/reward/std=0.4000, test/env/all/total_episodes=64" in page.text


def test_runs_of_one_name_are_told_apart_by_their_paths() -> None:
    assert labels_of([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert labels_of([Path("/a/x/one"), Path("/a/y/two")]) == ["one", "two"]


def test_the_rollouts_of_the_last_step_can_be_read_on_the_page(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for step in (0, 3):
        write_rollouts(
            path, [row(f"the answer of step {step} {EVIL}", step=step, member=number) for number in range(2)]
        )
    html = page_of([contents_of(path)], path / "report.html")
    page = Page(html)
    assert "the answer of step 3" in page.text
    assert "the answer of step 0" not in page.text
    assert "<script>alert(1)</script>" in page.text
    assert html.count("<script>") == 1  # what else is in a script element is data


# ---- the command -----------------------------------------------------------------------------------------------------


def test_markdown_has_every_table_and_json_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run")
    assert main(["report", str(path), "--markdown"]) == 0
    said = capsys.readouterr().out
    for words in ("# Report: run", "| loss | 2.000 | 0.5000 |", "0.2000 ± 0.05", "| time/train |", "- final: `"):
        assert words in said, words
    assert main(["report", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["evaluations"][0] == {
        "metric": "test/accuracy", "steps": [0, 2], "values": [0.0, 0.2], "errors": [0.05, 0.05],
    }  # fmt: skip
    assert not (path / "report.html").exists()


def test_of_several_runs_json_is_a_list_and_the_page_lies_in_the_current_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(make_run(tmp_path / name)) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *paths, "--json"]) == 0
    assert [Path(each["run"]).name for each in json.loads(capsys.readouterr().out)] == ["a", "b"]
    assert main(["report", *paths]) == 0
    assert (tmp_path / "report.html").is_file()
    assert main(["report", *paths, "--to", str(tmp_path / "other.html")]) == 0
    assert f"the page: {tmp_path / 'other.html'}" in capsys.readouterr().out
    assert main(["report", paths[0], paths[0]]) == 2


def test_pages_of_rollouts_are_linked_from_where_the_page_lies(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for name in ("iteration_000000/train.html", "iteration_000003/eval_test.html"):
        (path / name).parent.mkdir()
        (path / name).write_text("a page")
    page = page_of([contents_of(path)], tmp_path / "report.html")
    links = re.findall(r'href="(run/[^"]*)"', page)
    assert links == ["run/iteration_000003/eval_test.html", "run/iteration_000000/train.html"]
