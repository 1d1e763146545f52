"""What happens when a workflow runs: order, what each item sees, failures by name, events, and what is closed."""

import asyncio
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import virtual_time
from kitchen.toys import Config, add, double, draw, logger, measure, plan, toy
from stovetop.errors import InvalidRequest, StageFailed
from stovetop.kitchen import Loop, Positions, Row, Station, When, Workflow, stage
from stovetop.runs import Run, load, open_run
from stovetop.tracking.events import Event, Recorder

NO_CONFIG = Config()


def run(workflow: Workflow, config: Config = NO_CONFIG, **ports: object) -> dict[str, Any]:
    return virtual_time.run(workflow.run(config, **ports))


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


@stage
async def pause(step: int) -> None:
    await asyncio.sleep(0.1 * (step % 3))


@contextmanager
def opened(path: Path, recorder: Recorder) -> Iterator[Run]:
    with open_run(path, NO_CONFIG, console=False, sinks=[recorder], allow_config_changes=True) as run:
        yield run


# ---- values ----------------------------------------------------------------------------------------------------------


def test_stages_run_in_order_and_the_state_at_the_end_is_what_was_written_outside_the_loop() -> None:
    seen: list[str] = []

    @stage(writes="answer")
    async def ask(total: int, totals: list[int]) -> str:
        return f"{total} {totals}"

    def noting(name: str) -> Callable[[int], None]:
        def note(step: int) -> None:
            seen.append(f"{name}{step}")

        return note

    first, second = stage(noting("a")).using("first"), stage(noting("b")).using("second")
    loop = Loop("positions", Station(first, draw), Station(second, add), carry={"total": "totals"})
    state = run(Workflow("toy", plan, loop, ask), Config(num_steps=2))
    assert seen == ["a0", "b0", "a1", "b1"]
    assert state == {"positions": Positions(3, 2), "totals": [1], "total": 1, "answer": "1 [1]"}


def test_a_value_is_changed_by_a_stage_that_reads_and_writes_it() -> None:
    rows: list[dict[str, float]] = []
    run(toy(rows).insert_after("draw", double))
    assert [row["number"] for row in rows] == [0, 2, 4, 6, 8, 10]


def test_an_absent_name_has_its_default_and_a_condition_is_asked_once_an_item() -> None:
    asked: list[int] = []

    def rarely(step: int, every: int = 3) -> bool:
        asked.append(step)
        return step % every == 0

    rows: list[dict[str, float]] = []
    log = logger(rows)
    loop = Loop(
        "positions",
        Station(draw, When(rarely, measure), add),
        Station(log, When(rarely, measure.using("again", extra="more"))),
        carry={"total": "totals"},
    )
    run(Workflow("toy", plan, loop))
    assert asked == [0, 1, 2, 3, 4, 5]
    assert [row.get("extra") for row in rows] == [0, None, 1, None, 2, None]  # every is 2, from the config


def test_several_names_come_from_a_named_tuple_or_a_dict() -> None:
    class Pair(NamedTuple):
        left: int
        right: int

    @stage(writes=("left", "right"))
    def pair() -> Pair:
        return Pair(1, 2)

    @stage(writes=("up", "down"))
    def words(left: int) -> dict[str, int]:
        return {"up": left, "down": -left, "further": 3}

    state = run(Workflow("pairs", pair, words.using("other", up="above")))
    assert state == {"left": 1, "right": 2, "above": 1, "down": -1}


def test_a_plain_function_that_returns_a_future_writes_the_future() -> None:
    @stage(writes="future")
    def submit() -> "asyncio.Future[int]":
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(3)
        return future

    @stage(writes="result")
    async def await_future(future: "asyncio.Future[int]") -> int:
        return await future

    assert run(Workflow("futures", submit, await_future))["result"] == 3


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "'number' must be list[int], as the function says; is a return missing? It is NoneType"),
        (3, "'number' must be list[int], as the function says; is a return missing? It is int"),
    ],
)
def test_a_forgotten_return_is_named(returned: Any, message: str) -> None:
    @stage(writes="number")
    async def forgets() -> list[int]:
        return returned

    with pytest.raises(StageFailed) as failed:
        run(Workflow("w", forgets))
    assert str(failed.value) == f"stage 'forgets' of workflow 'w' failed: {message}"


def test_a_value_without_a_name_and_a_name_without_a_value_are_refused() -> None:
    @stage
    async def unnamed() -> int:
        return 3

    @stage(writes=("a", "b"))
    async def partial() -> dict[str, int]:
        return {"a": 1}

    with pytest.raises(
        StageFailed, match=r"it writes nothing and returned a value; name it in @stage\(writes=...\): 3"
    ):
        run(Workflow("w", unnamed))
    with pytest.raises(StageFailed, match="it must return a NamedTuple or a dict with a, b; b is not in it"):
        run(Workflow("w", partial))


def test_what_an_item_held_is_let_go_when_it_leaves() -> None:
    class Big:
        pass

    alive: weakref.WeakSet[Big] = weakref.WeakSet()
    most: list[int] = []

    @stage(writes="big")
    async def make(step: int) -> Big:
        most.append(len(alive))
        alive.add(big := Big())
        return big

    @stage
    async def use(big: Big) -> None:
        await asyncio.sleep(0.1)

    loop = Loop("positions", Station(make, together=True), Station(use), depth="depth")
    run(Workflow("w", plan.using("plan"), loop), Config(num_steps=8, depth=2))
    assert max(most) <= 2  # the others on the line
    assert len(alive) == 0


# ---- carry -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(0, 9), st.lists(st.booleans(), min_size=2, max_size=3))
def test_an_item_sees_what_the_one_so_many_before_it_has_left(depth: int, num_steps: int, together: list[bool]) -> None:
    lags: list[int] = []

    @stage(writes="version")
    async def train(step: int, version: int) -> int:
        lags.append(step - version)
        return step + 1

    @stage(writes=("positions", "versions"))
    def begin(num_steps: int) -> dict[str, Any]:
        return {"positions": Positions(3, num_steps), "versions": [0]}

    first = [Station(pause.using(f"pause{n}"), together=each) for n, each in enumerate(together)]
    loop = Loop("positions", *first, Station(train), depth="depth", carry={"version": "versions"})
    state = run(Workflow("lag", begin, loop), Config(num_steps=num_steps, depth=depth))
    assert lags == [min(step, depth) for step in range(num_steps)]
    assert state["versions"] == [max(0, num_steps - depth + ahead) for ahead in range(depth + 1)]
    assert state["version"] == num_steps


@given(st.integers(0, 3), st.integers(1, 7), st.data())
def test_a_loop_that_goes_on_with_the_list_sees_what_the_uninterrupted_one_sees(
    depth: int, num_steps: int, data: st.DataObject
) -> None:
    stops = data.draw(st.integers(0, num_steps))

    def rows_of(start: int, stop: int, totals: list[int], saved: dict[int, list[int]]) -> list[dict[str, float]]:
        @stage(writes=("positions", "totals"))
        def begin() -> dict[str, Any]:
            return {"positions": Positions(3, stop, start), "totals": totals}

        @stage
        def save(step: int, totals: list[int]) -> None:
            saved[step + 1] = totals

        rows: list[dict[str, float]] = []
        workflow = toy(rows).replace("plan", begin).insert_after("log", save).insert_before("draw", pause)
        state = run(workflow, Config(depth=depth))
        assert saved.get(stop, totals) == state["totals"] or start == stop
        return without_times(rows)

    saved: dict[int, list[int]] = {0: [0]}
    whole = rows_of(0, num_steps, [0], saved)
    assert all(len(totals) == depth + 1 for step, totals in saved.items() if step)
    assert whole[:stops] + rows_of(stops, num_steps, saved[stops], {}) == whole


def test_the_first_item_of_an_epoch_and_the_first_after_a_resume_enter_it() -> None:
    entered: list[int] = []
    ended: list[int] = []

    def enters(enters_epoch: bool) -> bool:
        return enters_epoch

    def ends(ends_epoch: bool) -> bool:
        return ends_epoch

    @stage
    async def enter(step: int) -> None:
        entered.append(step)

    @stage
    async def end(step: int) -> None:
        ended.append(step)

    workflow = toy().insert_before("draw", When(enters, enter)).insert_after("log", When(ends, end))
    run(workflow, Config(num_steps=10, num_per_epoch=5, depth=1))
    run(workflow, Config(num_steps=10, num_per_epoch=5, depth=1, start=3))
    assert (entered, ended) == ([0, 5, 3, 5], [4, 9, 4, 9])


def test_an_empty_list_to_carry_from_is_refused() -> None:
    @stage(writes=("positions", "totals"))
    def empty() -> dict[str, Any]:
        return {"positions": Positions(1, 1), "totals": []}

    with pytest.raises(InvalidRequest, match="the loop begins with what is in this list, and it is empty: 'totals'"):
        run(toy().replace("plan", empty))


# ---- the row ---------------------------------------------------------------------------------------------------------


def test_a_row_takes_each_metric_once_and_none_after_it_is_logged(tmp_path: Path) -> None:
    row = Row(3)
    row.writer = "train"
    row.add({"loss": 1.0})
    with pytest.raises(
        InvalidRequest, match=r"the row of step 3 has this metric already, from stage 'train'.*: 'loss'"
    ):
        row.add({"loss": 2.0})
    with pytest.raises(InvalidRequest, match="'name' must be a number"):
        row.add({"name": "a"})  # pyright: ignore[reportArgumentType]  what is tested
    with pytest.raises(InvalidRequest, match="a metric cannot be called 'step'"):
        row.add({"step": 4})
    with opened(tmp_path, Recorder()) as run:
        row.log(run)
        with pytest.raises(InvalidRequest, match="the row of step 3 is logged; add to it in an earlier stage: 'late'"):
            row.add({"late": 1})
    assert load(tmp_path).metrics == [{"step": 3, "loss": 1.0}]


@stage
async def log_step(row: Row, run: Run) -> None:
    """Writes the row."""
    row.log(run)


def test_a_row_has_the_time_of_every_stage_before_it_that_since_the_row_before_and_that_of_its_step(
    tmp_path: Path,
) -> None:
    workflow = toy().replace("log", log_step).insert_after("log_step", draw.using("later", number="last"))
    with opened(tmp_path, Recorder()) as running:
        asyncio.run(workflow.run(Config(depth=1, num_steps=4), run=running))
    rows = load(tmp_path).metrics
    assert [set(row) for row in rows[:2]] == [
        {"step", "number", "seen", "time/draw", "time/measure", "time/add", "time/step", "time/total"},
        {"step", "number", "seen", "time/draw", "time/add", "time/step", "time/total"},
    ]
    assert all(row["time/step"] >= row["time/add"] > 0 for row in rows)
    assert all(row["time/total"] >= row["time/draw"] + row["time/add"] for row in rows)


def test_progress_advances_when_an_item_has_left(tmp_path: Path) -> None:
    with open_run(tmp_path, NO_CONFIG, console=False) as running:
        shown = running.progress

        class Bar:
            completed = 0

            def advance(self) -> None:
                self.completed += 1

        bar = Bar()

        @contextmanager
        def progress(description: str, *, total: int, completed: int) -> Iterator[Bar]:
            assert (description, total, completed) == ("toy", 6, 2)
            yield bar

        running.progress = progress  # pyright: ignore[reportAttributeAccessIssue]  seen from within
        run(toy(), Config(start=2), run=running)
        running.progress = shown
    assert bar.completed == 4


# ---- failures --------------------------------------------------------------------------------------------------------


def failing(at: int, error: BaseException):
    @stage
    async def breaks(step: int) -> None:
        await asyncio.sleep(0.05)
        if step == at:
            raise error

    return breaks


@pytest.mark.parametrize("depth", [0, 2])
def test_a_failure_names_the_stage_the_workflow_and_the_step(depth: int) -> None:
    error = InvalidRequest("card fell off")
    with pytest.raises(StageFailed) as failed:
        run(toy().insert_before("add", failing(3, error)), Config(depth=depth))
    assert str(failed.value) == "stage 'breaks' of workflow 'toy' failed at step 3: card fell off"
    assert (failed.value.stage, failed.value.workflow, failed.value.step) == ("breaks", "toy", 3)
    assert failed.value.__cause__ is error


def test_a_failure_of_another_kind_says_which_and_one_of_a_group_is_named_itself() -> None:
    with pytest.raises(StageFailed, match="failed at step 0: KeyError: 'x'"):
        run(toy().insert_before("add", failing(0, KeyError("x"))))
    with pytest.raises(StageFailed, match="failed at step 0: ValueError: inner"):
        run(toy().insert_before("add", failing(0, ExceptionGroup("outer", [ValueError("inner")]))))

    def broken(step: int) -> bool:
        raise LookupError("no such step")

    with pytest.raises(
        StageFailed, match=r"^condition 'broken' of workflow 'toy' failed at step 0: LookupError: no such step"
    ):
        run(toy().insert_before("add", When(broken, pause)))


@pytest.mark.parametrize("place", ["draw", "add", "plan"])
def test_waiting_for_something_that_was_cancelled_fails_by_name_and_does_not_hang(place: str) -> None:
    @stage
    async def waits() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(StageFailed, match=r"stage 'waits'.*: something that it waited for was cancelled") as failed:
        asyncio.run(toy().insert_before(place, waits).run(Config(depth=1)))
    assert failed.value.step == (None if place == "plan" else 0)
    assert isinstance(failed.value.__cause__, asyncio.CancelledError)


@pytest.mark.parametrize("place", ["draw", "add", "plan"])
def test_a_keyboard_interrupt_and_a_cancellation_pass_as_they_are(place: str) -> None:
    @stage
    async def interrupted() -> None:
        raise KeyboardInterrupt

    @stage
    async def waits() -> None:
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(toy().insert_before(place, interrupted).run(Config(depth=1)))
    gc.collect()  # asyncio logs the task that ended so; here, and not when the tests are over

    async def cancelled() -> None:
        async with asyncio.timeout(1):
            await toy().insert_before(place, waits).run(Config(depth=1))

    with pytest.raises(TimeoutError):
        virtual_time.run(cancelled())


# ---- generators ------------------------------------------------------------------------------------------------------


def opening(name: str, closed: list[str], *, fails: bool = False):
    @stage(writes=name)
    async def opens() -> AsyncIterator[str]:
        yield name
        await asyncio.sleep(0.01)
        closed.append(name)
        if fails:
            raise OSError(f"{name} does not close")

    return opens.using(f"open_{name}")


ENDS = ["well", "with a failure", "with a failure at set-up", "cancelled", "interrupted"]


@pytest.mark.parametrize("end", ENDS)
def test_what_was_opened_is_closed_in_reverse_however_the_workflow_ends(end: str) -> None:
    closed: list[str] = []
    workflow = toy().insert_before("plan", opening("a", closed), opening("b", closed))
    workflow = workflow.insert_after("plan", opening("c", closed))

    async def main() -> None:
        match end:
            case "well":
                await workflow.run(Config(depth=1))
            case "with a failure":
                await workflow.insert_before("add", failing(1, ValueError())).run(Config(depth=1))
            case "with a failure at set-up":
                await workflow.insert_before("plan", fails_early).run(Config())
            case "cancelled":
                async with asyncio.timeout(0.2):
                    await workflow.insert_before("add", slow).run(Config(depth=1))
            case _:
                await workflow.insert_after("log", failing(1, KeyboardInterrupt())).run(Config())

    errors = {"well": None, "cancelled": TimeoutError, "interrupted": KeyboardInterrupt}
    expected = errors.get(end, StageFailed)
    if expected is None:
        virtual_time.run(main())
    else:
        with pytest.raises(expected):
            virtual_time.run(main())
        gc.collect()  # as above
    assert closed == (["b", "a"] if end == "with a failure at set-up" else ["c", "b", "a"])


@stage
async def fails_early() -> None:
    raise ValueError("early")


@stage
async def slow() -> None:
    await asyncio.sleep(60)


def test_a_generator_that_fails_to_close_is_named_and_the_others_are_closed() -> None:
    closed: list[str] = []
    workflow = toy().insert_before("plan", opening("a", closed), opening("b", closed, fails=True))
    with pytest.raises(StageFailed, match="stage 'open_b' of workflow 'toy' failed: OSError: b does not close"):
        run(workflow)
    assert closed == ["b", "a"]
    with pytest.raises(StageFailed, match="stage 'breaks'"):
        run(workflow.insert_before("add", failing(1, ValueError())))


def test_a_generator_that_fails_to_open_is_not_closed_and_one_yields_once() -> None:
    closed: list[str] = []

    @stage(writes="pool")
    async def never() -> AsyncIterator[int]:
        if closed == ["never"]:
            yield 1

    @stage(writes="pool")
    async def twice() -> AsyncIterator[int]:
        yield 1
        yield 2

    with pytest.raises(StageFailed, match=r"stage 'never'.*: it yields nothing"):
        run(toy().insert_before("plan", opening("a", closed), never))
    assert closed == ["a"]
    with pytest.raises(StageFailed, match=r"stage 'twice'.*: it yields a second time"):
        run(toy().insert_before("plan", twice))


def test_a_task_group_that_a_generator_holds_stops_the_run_when_a_task_of_it_fails() -> None:
    stopped: list[str] = []

    @stage(writes="pool")
    async def open_pool() -> AsyncIterator[int]:
        async def work() -> None:
            await asyncio.sleep(0.25)
            raise ConnectionError("the worker is gone")

        async with asyncio.TaskGroup() as group:
            task = group.create_task(work())
            yield 1
            task.cancel()

    @stage
    async def busy() -> None:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            stopped.append("busy")
            raise

    async def main() -> None:
        with pytest.raises(StageFailed, match=r"stage 'open_pool'.*: ConnectionError: the worker is gone"):
            await toy().insert_before("plan", open_pool).insert_before("add", busy).run(Config(depth=1))
        assert len(asyncio.all_tasks()) == 1
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    virtual_time.run(main())
    assert stopped == ["busy"]
    run(toy().insert_before("plan", open_pool), Config(num_steps=1))


# ---- events ----------------------------------------------------------------------------------------------------------


def spans(events: list[Event]) -> Counter[tuple[str, str, int | None]]:
    """How often each event of a stage and of the workflow came."""
    return Counter(
        (event.name, event.labels.get("stage", event.labels.get("workflow", "")), event.step)
        for event in events
        if event.name.startswith(("stage.", "workflow."))
    )


def test_every_stage_and_the_workflow_emit_a_start_and_a_stop(tmp_path: Path) -> None:
    recorder = Recorder()
    with opened(tmp_path, recorder) as running:
        run(toy(), Config(num_steps=2, depth=1), run=running)
    names = [("plan", None), *itertools.product(("draw", "add", "log"), (0, 1)), ("measure", 0)]
    expected = Counter((f"stage.{end}", name, step) for name, step in names for end in ("start", "stop"))
    assert spans(recorder.events) == expected + Counter(
        [("workflow.start", "toy", None), ("workflow.stop", "toy", None)]
    )
    assert all(
        event.values["seconds"] > 0 for event in recorder.events if event.name in ("stage.stop", "workflow.stop")
    )


@given(st.sampled_from(["plan", "draw", "measure", "add", "log"]), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_events_are_balanced_whatever_fails_or_is_cancelled(
    tmp_path_factory: pytest.TempPathFactory, place: str, at: int, depth: int, cancels: bool
) -> None:
    recorder = Recorder()

    @stage
    async def breaks(step: int = -1) -> None:
        await asyncio.sleep(0.05)
        if step in (at, -1):
            if cancels:
                await asyncio.sleep(60)
            raise ValueError("here")

    class Emits(Run):
        def __init__(self) -> None:
            self.path = tmp_path_factory.getbasetemp()

        def emit(self, name: str, /, *, step: int | None = None, **fields: Any) -> None:
            recorder.receive(Event(name, step, {}, {key: str(value) for key, value in fields.items()}))

        def progress(self, description: str, *, total: int, completed: int = 0) -> Any:
            return nothing_shown()

    async def main() -> None:
        with pytest.raises((StageFailed, TimeoutError)):
            async with asyncio.timeout(5):
                await (
                    toy()
                    .insert_before(place, breaks, pause if place != "plan" else breaks.using("more"))
                    .run(Config(depth=depth), run=Emits())
                )

    virtual_time.run(main())
    open_spans: Counter[tuple[str, int | None]] = Counter()
    for event in recorder.events:
        key = (event.labels.get("stage", "the workflow"), event.step)
        open_spans[key] += 1 if event.name.endswith(".start") else -1
        assert open_spans[key] in (0, 1)
    assert not any(open_spans.values())
    failures = [event.labels["error"] for event in recorder.events if event.name == "workflow.exception"]
    assert len(failures) == 1
    assert failures[0].startswith("CancelledError" if cancels else "StageFailed: stage 'breaks'")


@contextmanager
def nothing_shown() -> Iterator[Any]:
    class Nothing:
        def advance(self) -> None: ...

    yield Nothing()
