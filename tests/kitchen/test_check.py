"""Every problem that can be known before a workflow runs, in the words that its user reads."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import pytest

from kitchen.toys import Config, add, double, draw, is_even, logger, measure, plan, toy
from stovetop.backends import recording
from stovetop.client import ServiceClient, TrainingClient
from stovetop.errors import InvalidRequest
from stovetop.kitchen import Loop, Position, Positions, Row, RunConfig, Station, When, Workflow, stage
from stovetop.kitchen.stage import AnyStage
from stovetop.rules import Whole
from stovetop.runs import Run

log = logger([])


def problems(workflow: Workflow, config: Config | type[Config] = Config, **ports: object) -> list[str]:
    return list(workflow.check(config, ports).problems)


def one_problem(workflow: Workflow, config: Config | type[Config] = Config, **ports: object) -> str:
    found = problems(workflow, config, **ports)
    assert len(found) == 1, found
    return found[0]


def looped(*stations: Station, depth: int | str = "depth") -> Workflow:
    return Workflow("toy", plan, Loop("positions", *stations, depth=depth, carry={"total": "totals"}))


def test_a_workflow_without_a_fault_has_no_problems_and_says_who_reads_what() -> None:
    checked = toy().check(Config())
    assert checked.problems == ()
    assert checked.unread == ()
    assert checked.config_fields == {
        "num_steps": ("plan",), "num_per_epoch": ("plan",), "start": ("plan",), "depth": ("the loop",),
        "every": ("is_even",),
    }  # fmt: skip


@stage
async def kl(referense: int) -> None: ...


@stage
async def early(number: int) -> None: ...


@stage(writes="data_D")
async def get_batch(step: int) -> list[int]:
    return [step]


@stage
async def use_data(data_D: list[int]) -> None: ...


@stage
async def use_epoch(epoch: int) -> None: ...


@stage(writes="reference")
async def open_reference() -> int:
    return 1


CARRYING = Loop("positions", Station(draw, get_batch, add, log), depth="depth", carry={"total": "totals"})


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (
            toy().insert_before("plan", open_reference).insert_before("add", kl),
            "stage 'kl' reads 'referense', and nobody writes it before: no config field of Config, no port, no earlier "
            "stage's; did you mean 'reference'?",
        ),
        (
            toy().insert_before("draw", early),
            "stage 'early' reads 'number', and nobody writes it before: no config field of Config, no port, no earlier "
            "stage's; stage 'draw' writes it later",
        ),
        (
            Workflow("toy", plan, CARRYING, use_data),
            "stage 'use_data' reads 'data_D', which exists only inside the loop (stage 'get_batch')",
        ),
        (
            toy().insert_before("plan", use_epoch),
            "stage 'use_epoch' reads 'epoch', which exists only inside the loop (the loop gives it)",
        ),
        (
            toy().insert_after("draw", draw.using("mine")),
            "'number' has two sources: stage 'draw', and stage 'mine'; a stage that changes a value reads it too",
        ),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_is_named_with_its_reader(workflow: Workflow, message: str) -> None:
    assert one_problem(workflow) == message


def test_what_a_conditional_stage_writes_is_read_with_a_default_or_under_the_same_condition() -> None:
    @stage
    async def show(extra: float) -> None: ...

    assert one_problem(toy().insert_after("measure", show)) == (
        "stage 'show' reads 'extra', which stage 'measure' writes only when is_even; give the parameter a default"
    )
    assert problems(toy().insert_after("add", When(is_even, show))) == []


def test_a_condition_on_the_config_alone_has_one_answer_before_and_in_the_loop() -> None:
    @stage(writes="extra")
    async def open_extra() -> float:
        return 0.5

    @stage
    async def show(extra: float) -> None: ...

    def is_wanted(every: int) -> bool:
        return every > 1

    def is_planned(every: int, positions: Positions | None = None) -> bool:
        return every > 1

    without = toy().remove("measure")
    wanted = without.insert_after("plan", When(is_wanted, open_extra)).insert_after("add", When(is_wanted, show))
    assert problems(wanted) == []
    planned = without.insert_after("plan", When(is_planned, open_extra)).insert_after("add", When(is_planned, show))
    assert "writes only when is_planned" in problems(planned)[0]


def test_a_stage_that_changes_a_value_reads_it_too() -> None:
    assert problems(toy().insert_after("draw", double)) == []


def test_what_was_written_before_the_loop_cannot_be_changed_in_it() -> None:
    @stage(writes="seed")
    async def set_seed() -> int:
        return 0

    @stage(writes="seed")
    async def next_seed(seed: int) -> int:
        return seed + 1

    workflow = toy().insert_before("plan", set_seed).insert_before("add", next_seed)
    assert one_problem(workflow) == (
        "stage 'next_seed' changes 'seed' inside the loop, and stage 'set_seed' wrote it before the loop: items would "
        "differ by who came first; write another name"
    )


@pytest.mark.parametrize(
    ("written", "source"), [("every", "config field 'every'"), ("spoon", "port 'spoon'"), ("step", "the loop")]
)
def test_config_fields_ports_and_what_the_loop_gives_are_never_written(written: str, source: str) -> None:
    workflow = toy().insert_before("add", measure.using("mine", extra=written))
    assert one_problem(workflow, spoon=1) == (
        f"{written!r} has two sources: {source}, and stage 'mine'; config fields, ports and what the loop gives are "
        f"never written"
    )


def test_a_config_field_a_port_and_the_loop_cannot_give_the_same_name() -> None:
    assert problems(toy(), every=3, row=1) == [
        "'every' has two sources: config field 'every', and port 'every'",
        "'row' has two sources: port 'row', and the loop",
    ]


def test_missing_ports_are_named_together_with_who_reads_them() -> None:
    @stage
    async def init_session(service: ServiceClient, run: Run) -> None: ...

    @stage
    async def log_run(run: Run) -> None: ...

    workflow = toy().insert_before("plan", init_session).replace("log", log_run)
    assert one_problem(workflow) == "missing ports: service (read by init_session), run (by init_session, log_run)"
    assert problems(workflow, service=ServiceClient, run=Run) == []
    with recording.open_service() as service:
        assert problems(workflow, service=service, run=Run) == []


def test_an_optional_read_of_a_port_that_is_absent_is_no_problem() -> None:
    @stage
    async def maybe(run: Run | None = None) -> None: ...

    assert problems(toy().insert_before("plan", maybe)) == []
    assert one_problem(toy(), run=3) == "port 'run' must be a Run, which open_run gives, not int"


def test_types_are_compared_with_those_of_the_writer_the_config_the_ports_and_the_loop() -> None:
    @stage
    async def wants(number: str, every: str, spoon: str, epoch: str, total: str) -> None: ...

    assert problems(toy().insert_after("draw", wants), spoon=1) == [
        "stage 'wants' reads 'number' as str; stage 'draw' gives int",
        "stage 'wants' reads 'every' as str; config field 'every' gives int",
        "stage 'wants' reads 'spoon' as str; port 'spoon' gives int",
        "stage 'wants' reads 'epoch' as str; the loop gives int",
        "stage 'wants' reads 'total' as str; the loop gives int",
    ]


def test_a_port_may_be_a_class_which_is_not_taken_for_a_value_of_it() -> None:
    class Oven: ...

    @dataclass(frozen=True)
    class NoFields: ...

    @stage
    def bake(oven: type[Oven], make: Callable[[], Oven]) -> None: ...
    @stage
    def clean(oven: Oven) -> None: ...

    asyncio.run(Workflow("bakes", bake).run(NoFields(), oven=Oven, make=Oven))
    with pytest.raises(InvalidRequest, match="'clean' reads 'oven' as Oven; port 'oven' gives type"):
        asyncio.run(Workflow("cleans", clean).run(NoFields(), oven=Oven))


def test_a_value_of_the_config_is_held_to_the_rules_of_those_who_read_it() -> None:
    @stage
    async def few(step: Annotated[int, Whole(0)], number: Annotated[int, Whole(1, 4)] = 1, absent: int = 0) -> None: ...

    workflow = toy().insert_after("draw", few.using("often", number="every"), few.using("never", number="depth"))
    assert problems(workflow, Config(every=5, depth=2)) == [
        "stage 'often' reads 'every', which must be an integer from 1 to 4: 5"
    ]
    assert problems(workflow, Config(every=4, depth=4)) == []
    assert problems(workflow, Config) == []
    with pytest.raises(InvalidRequest, match="which must be an integer from 1 to 4: 0"):
        asyncio.run(workflow.run(Config(every=0, depth=1)))


def test_two_stages_of_one_name_are_refused() -> None:
    assert one_problem(toy().insert_after("measure", early, early)) == (
        "2 stages are named 'early'; give one of them another: stage.using('other_name')"
    )


@pytest.mark.parametrize("value", [2, 3])
def test_a_config_field_that_no_stage_reads_is_listed_and_a_problem_when_it_is_set(value: int) -> None:
    workflow = toy().remove("measure")
    assert workflow.check(Config).unread == ("every",)
    assert workflow.check(Config).problems == ()
    expected = [] if value == 2 else ["config field 'every' is set to 3, and no stage reads it"]
    assert problems(workflow, Config(every=value)) == expected


def test_the_fields_of_the_run_and_the_service_need_no_reader_but_the_recipes_own_do() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(RunConfig):
        words: ClassVar[str] = "no field"
        log_path: str = "runs/mine"
        tags: list[str] = field(default_factory=list[str])

    workflow = Workflow("empty", open_reference)
    assert workflow.check(Mine(log_path="elsewhere", base_url="recording")).problems == ()
    assert workflow.check(Mine()).unread == ("tags",)
    assert list(workflow.check(Mine(tags=["a"])).problems) == [
        "config field 'tags' is set to ['a'], and no stage reads it"
    ]


# ---- the loop --------------------------------------------------------------------------------------------------------


@stage(writes="training_client")
async def init(service: ServiceClient) -> TrainingClient:
    return await service.create_lora_training_client("some/model")


@stage
async def train(training_client: TrainingClient) -> None: ...


@stage
async def submit_evaluation(training_client: TrainingClient | None = None) -> None: ...


def test_a_training_client_is_used_in_one_station() -> None:
    workflow = Workflow(
        "toy",
        init,
        plan,
        Loop("positions", Station(draw, train), Station(submit_evaluation, add), carry={"total": "totals"}),
        train.using("at_the_end"),
    )
    assert workflow.check(Config, {"service": ServiceClient}).problems == (
        "stages 'train' and 'submit_evaluation' use the training client in two stations: what one submits for an item "
        "would mix with what the other submits for the next; put them in one station",
    )
    assert workflow.remove("train").check(Config, {"service": ServiceClient}).problems == ()


def test_a_training_client_is_not_used_where_items_are_served_together() -> None:
    workflow = Workflow(
        "toy",
        init,
        plan,
        Loop("positions", Station(draw, train, together=True), Station(add), carry={"total": "totals"}),
    )
    assert workflow.check(Config, {"service": ServiceClient}).problems == (
        "stage 'train' uses the training client in a station that serves items together: what it submits for an item "
        "would mix with what it submits for the next; put it in one that does not",
    )


def test_the_row_of_a_step_comes_before_the_row_of_its_checkpoint_in_the_last_station() -> None:
    @stage
    async def log_step(row: Row) -> None: ...

    @stage
    async def record_checkpoint(number: int) -> None: ...

    rule = "must be in the last station, behind log_step: a run killed in between would lose a row"
    message = f"stage 'record_checkpoint' {rule}"
    carried = (draw, add)
    assert problems(looped(Station(*carried), Station(log_step, record_checkpoint))) == []
    assert one_problem(looped(Station(*carried), Station(record_checkpoint, log_step))) == message
    assert one_problem(looped(Station(*carried, log_step, record_checkpoint), Station(early))) == message


def test_an_async_generator_is_refused_inside_the_loop() -> None:
    @stage(writes="pool")
    async def open_pool() -> AsyncIterator[int]:
        yield 1

    assert problems(toy().insert_before("plan", open_pool)) == []
    assert one_problem(toy().insert_before("draw", open_pool)) == (
        "stage 'open_pool' is an async generator, which stays open until the end; put it before the loop"
    )


def test_exactly_one_stage_of_the_loop_writes_the_carry_in_every_step() -> None:
    expected = "'total' is carried: exactly one stage of the loop writes it, in every step, not "
    assert one_problem(looped(Station(draw, log))) == expected + "none"
    assert (
        one_problem(looped(Station(draw, add, add.using("again"))))
        == expected + "add (loop, station 1), again (loop, station 1)"
    )
    assert one_problem(looped(Station(draw, add, together=True))) == expected + "add (loop, station 1, together)"
    assert one_problem(looped(Station(draw, When(is_even, add)))) == expected + "add (loop, station 1, when is_even)"


def test_what_is_carried_is_listed_in_full_only_behind_its_writer() -> None:
    @stage
    async def save(totals: list[int]) -> None: ...

    message = "stage 'save' reads 'totals', complete only behind stage 'add', which writes what is carried"
    assert problems(looped(Station(draw, add), Station(save))) == []
    assert problems(looped(Station(draw, add, save), Station(log))) == []
    assert one_problem(looped(Station(save, draw, add))) == message
    assert one_problem(looped(Station(save, draw, together=True), Station(add))) == message


def test_the_loop_itself_reads_its_items_and_the_first_of_what_it_carries() -> None:
    @stage(writes="positions")
    def numbers() -> list[int]:
        return [1]

    workflow = Workflow("toy", numbers, Loop("positions", Station(draw, add), carry={"total": "totals"}))
    text = "and nobody writes it before: no config field of Config, no port, no earlier stage's"
    assert problems(workflow) == [
        "the loop reads 'positions' as Positions; stage 'numbers' gives list[int]",
        f"the loop reads 'totals', {text}; did you mean 'total'?",
    ]

    def sometimes(every: int) -> bool:
        return every == 2

    conditional = [
        f"the loop reads '{name}', which stage 'plan' writes only when sometimes" for name in ("positions", "totals")
    ]
    workflow = Workflow("toy", When(sometimes, plan), *toy().nodes[1:])
    assert problems(workflow) == [f"{each}; it is needed in any case" for each in conditional]


def test_the_depth_is_a_config_field_with_a_number_in_it() -> None:
    assert one_problem(looped(Station(draw, add), depth="deepness")) == (
        "the loop reads 'deepness', and nobody writes it before: no config field of Config, no port, no earlier stage's"
    )
    assert one_problem(looped(Station(draw, add)), Config(depth=-1)) == (
        "the loop reads 'depth', which must be an integer of at least 0: -1"
    )


def test_a_stage_that_writes_several_names_returns_what_has_them() -> None:
    class Pair(NamedTuple):
        first: int
        second: int

    @stage(writes=("first", "third"))
    def pair() -> Pair:
        return Pair(1, 2)

    assert one_problem(toy().insert_before("plan", pair)) == (
        "stage 'pair' writes first, third, and returns Pair with first, second"
    )


def test_all_problems_are_reported_at_once_and_nothing_runs() -> None:
    ran: list[str] = []

    @stage
    async def runs() -> None:
        ran.append("it")

    workflow = toy().insert_before("plan", runs, kl).insert_after("add", early, early)
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(workflow.run(Config()))
    first, *listed = str(refused.value).split("\n")
    assert first == "workflow 'toy' cannot run:"
    assert len(listed) == 2
    assert all(line.startswith("  - ") for line in listed)
    assert ran == []


def test_a_workflow_runs_with_a_value_of_its_config() -> None:
    with pytest.raises(InvalidRequest, match="with a value of its config, not with the class: Config"):
        asyncio.run(toy().run(Config))  # pyright: ignore[reportArgumentType]  what is tested


def test_a_config_is_a_dataclass() -> None:
    with pytest.raises(InvalidRequest, match=r"a config is a dataclass.*'depth': 1"):
        toy().check({"depth": 1})  # pyright: ignore[reportArgumentType]  what is tested


# ---- structure -------------------------------------------------------------------------------------------------------


def plain() -> None: ...
async def one_by_one(step: int) -> AsyncIterator[bool]:
    yield False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workflow("w", plain), r"made of Stage or When or Loop alone; decorate it with @stage: <function"),
        (lambda: Workflow("w", Station(draw)), "a Workflow is made of"),
        (lambda: Loop("positions", draw), "a Loop is made of Station alone"),
        (lambda: Station(Loop("positions")), "a Station is made of Stage or When alone"),
        (lambda: When(is_even, When(is_even, draw)), r"a When is made of Stage alone: When\(.*stage 'draw'"),
        (lambda: When(draw.function, draw), "a condition is a plain function that returns a bool: <function draw"),
        (lambda: When(lambda *names: True, draw), r"plain parameters.*\*names"),
        (lambda: Loop("positions", Station(draw), depth=-1), "the depth of a loop is 0 or more, or the .*: -1"),
        (lambda: Loop("positions", Station(draw), depth=1.5), "the depth of a loop is 0 or more, or the .*: 1.5"),
        (lambda: Loop("positions", carry={"a": "all", "b": "all"}), "each name that is carried has a list of its own"),
        (lambda: When(one_by_one, draw), "a condition is a plain function that returns a bool: <function one_by_one"),
        (lambda: Workflow("w", Loop("a", Station(draw)), Loop("b", Station(add))), "one loop at most.*'w'"),
        (lambda: Positions(0, 3), "at least 1 step"),
    ],
)  # fmt: skip
def test_what_a_workflow_cannot_be_made_of_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()


def test_positions_name_the_epoch_and_a_resumed_run_enters_its_epoch_anew() -> None:
    assert list(Positions(2, 5, 1)) == [
        Position(1, 0, 1, enters_epoch=True, ends_epoch=True),
        Position(2, 1, 0, enters_epoch=True, ends_epoch=False),
        Position(3, 1, 1, enters_epoch=False, ends_epoch=True),
        Position(4, 2, 0, enters_epoch=True, ends_epoch=False),
    ]
    assert list(Positions(5, 3, 4)) == []


# ---- edits -----------------------------------------------------------------------------------------------------------


def order(workflow: Workflow) -> list[str]:
    return [
        f"{each.stage.name}{'?' if each.condition else ''}@{each.station or each.phase}" for each in workflow.stages
    ]


def test_edits_return_a_new_workflow_and_leave_the_old_one_as_it_was() -> None:
    before = order(toy())
    assert before == ["plan@before", "draw@1", "measure?@2", "add@2", "log@2"]
    workflow = toy()
    assert order(workflow.replace("add", double, early)) == [
        "plan@before",
        "draw@1",
        "measure?@2",
        "double@2",
        "early@2",
        "log@2",
    ]
    assert order(workflow.insert_before("plan", early)) == ["early@before", *before]
    assert order(workflow.insert_after("log", early)) == [*before, "early@2"]
    assert order(workflow.remove("log")) == before[:-1]
    assert order(workflow) == before


def test_the_loop_can_be_had_at_another_depth_and_without_what_it_carried() -> None:
    @stage(writes="total")
    async def alone(number: int) -> int:
        return number

    at_two = toy().at_depth(2, {"total": "totals"})
    assert at_two.loop is not None
    assert (at_two.loop.depth, at_two.loop.carry) == (2, {"total": "totals"})
    assert at_two.stages[0] == toy().stages[0]
    assert problems(toy().at_depth(2)) == []
    assert problems(toy().at_depth(0, {}).replace("add", alone).remove("log")) == []
    with pytest.raises(InvalidRequest, match="a workflow without a loop has no depth: 'flat'"):
        Workflow("flat", toy().stages[0].stage).at_depth(1)


def test_what_replaces_a_conditional_stage_keeps_its_condition_and_what_is_inserted_beside_it_has_none() -> None:
    assert order(toy().replace("measure", early, kl))[2:4] == ["early?@2", "kl?@2"]
    assert order(toy().insert_before("measure", early))[2:4] == ["early@2", "measure?@2"]
    assert order(toy().insert_after("measure", early))[2:4] == ["measure?@2", "early@2"]
    assert order(toy().insert_after("add", When(is_even, early)))[4] == "early?@2"
    with pytest.raises(InvalidRequest, match="a When is made of Stage alone"):
        toy().replace("measure", When(is_even, early))


def test_a_when_or_a_station_without_a_stage_disappears() -> None:
    loop = toy().remove("draw").remove("measure").loop
    assert loop is not None
    assert len(loop.stations) == 1
    assert [type(node).__name__ for node in loop.stations[0].nodes] == ["Stage", "Stage"]


def test_an_edit_of_a_stage_that_is_not_there_or_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unknown stage of workflow 'toy' 'measur'; did you mean 'measure'"):
        toy().remove("measur")
    with pytest.raises(InvalidRequest, match=r"2 stages have this name.*'early'"):
        toy().insert_after("log", early, early).remove("early")


def test_a_description_says_where_each_stage_is_and_what_overlaps() -> None:
    described = toy().describe()
    assert [row.where for row in described.stages] == [
        "before the loop",
        "loop, station 1, together",
        "loop, station 2, when is_even",
        "loop, station 2",
        "loop, station 2",
    ]
    log_row = described.stages[-1]
    assert (log_row.stage, log_row.reads, log_row.optional, log_row.writes) == ("log", ("row", "extra"), ("extra",), ())
    assert log_row.doc == "Keeps the row."
    with open(log_row.file) as file:
        assert file.readlines()[log_row.line].strip().startswith("async def log(")
    assert described.notes == ()
    assert looped(Station(draw, add)).describe().notes == ("depth depth, one station: nothing overlaps",)
    assert looped(Station(draw, add), depth=0).describe().notes == ()


def test_a_description_names_each_type_that_is_not_compared_once() -> None:
    @stage(writes="thing")
    def make(number: "Unimportable") -> int:  # noqa: F821  # pyright: ignore[reportUndefinedVariable]  what is tested
        return 1

    @stage(writes="other")
    def use(number: "Unimportable", thing: int) -> "Unimportable":  # noqa: F821  # pyright: ignore[reportUndefinedVariable]  what is tested
        return thing

    assert toy().insert_before("log", make, use).describe().notes == (
        "the type of 'number' is not known when the program runs, and not compared: make, use",
        "the type of 'other' is not known when the program runs, and not compared: use",
    )


def test_stages_are_values() -> None:
    unused: AnyStage = draw
    assert unused == draw.using("draw")
    assert draw != draw.using("other")
