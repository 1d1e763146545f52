import io

from rich.console import Console

from stovetop.tracking.console import ConsoleSink, format_number, markdown_table, short_names
from stovetop.tracking.events import EventStream


def plain_console(width: int = 60) -> Console:
    return Console(file=io.StringIO(), width=width)


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_grows_by_a_row_a_step_and_has_a_new_header_when_a_metric_is_new():
    console = plain_console()
    stream = EventStream([ConsoleSink(console)])
    stream.log_metrics({"train_mean_nll": 1.93, "num_tokens": 1200}, 0)
    stream.log_metrics({"train_mean_nll": 0.5, "num_tokens": 900}, 1)
    stream.log_metrics({"train_mean_nll": 0.25, "test/nll": 3e-4}, 2)
    assert shown(console).splitlines() == [
        "  step  train_mean_nll  num_tokens",
        "     0           1.930        1200",
        "     1          0.5000         900",
        "  step  train_mean_nll  num_tokens   test/nll",
        "     2          0.2500               3.00e-04",
    ]


def test_chosen_columns_are_shown_in_their_order_and_nothing_else():
    console = plain_console()
    stream = EventStream([ConsoleSink(console, columns=["env/all/reward/total", "optim/entropy"])])
    stream.log_metrics({"optim/entropy": 0.4, "time/total": 6.3, "env/all/reward/total": 0.75}, 7)
    assert shown(console).splitlines() == ["  step  reward/total  optim/entropy", "     7        0.7500         0.4000"]


def test_without_a_choice_times_and_counts_of_steps_come_last():
    console = plain_console()
    EventStream([ConsoleSink(console)]).log_metrics({"time/train": 1.0, "progress/batch": 3, "loss": 2.0}, 0)
    assert shown(console).splitlines()[0].split() == ["step", "loss", "time/train", "progress/batch"]


def test_columns_that_do_not_fit_are_left_out_whole():
    console = plain_console(width=20)
    EventStream([ConsoleSink(console)]).log_metrics({"loss": 1.0, "entropy": 2.0}, 0)
    assert shown(console).splitlines() == ["  step       loss", "     0      1.000"]


def test_the_header_comes_back_in_a_long_table():
    console = plain_console()
    stream = EventStream([ConsoleSink(console)])
    for step in range(61):
        stream.log_metrics({"loss": 1.0}, step)
    assert shown(console).count("step") == 3


def test_text_and_tables_are_rendered_from_markdown():
    console = plain_console()
    table = markdown_table(["stage", "accuracy"], [["base", 0.0], ["after|RL", 0.906]])
    EventStream([ConsoleSink(console)]).log_long_text("Accuracy", table)
    text = shown(console)
    assert "Accuracy" in text
    assert [line.split() for line in text.splitlines() if "RL" in line] == [["after|RL", "0.9060"]]


def test_a_bar_shows_how_far_and_the_last_numbers():
    console, now_s = terminal(), [0.0]
    sink = ConsoleSink(console, clock=lambda: now_s[0])
    stream = EventStream([sink])
    with sink.progress("training", total=4, completed=1) as bar:
        stream.log_metrics({"loss": 0.125}, 1)
        now_s[0] = 2.5
        bar.advance()
    last = shown(console).splitlines()[-2]
    assert "training" in last
    assert "2/4" in last
    assert "2.5 s each" in last
    assert "loss 0.1250" in last


def test_bars_may_be_nested_and_one_may_follow_another():
    console = terminal()
    sink = ConsoleSink(console)
    for _ in range(2):
        with sink.progress("training", total=2) as outer:
            with sink.progress("evaluating", total=3) as inner:
                inner.advance(3)
            outer.advance()
    assert "evaluating" not in shown(console).splitlines()[-2]


def test_a_bar_ends_when_the_body_raises():
    console = terminal()
    sink = ConsoleSink(console)
    try:
        with sink.progress("training", total=2):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert shown(console).rstrip("\n").endswith("\x1b[?25h")  # the cursor is back


def test_without_a_terminal_a_bar_is_a_plain_line_now_and_then():
    console, now_s = plain_console(), [0.0]
    sink = ConsoleSink(console, clock=lambda: now_s[0])
    with sink.progress("training", total=100) as bar:
        for _ in range(100):
            now_s[0] += 1.0
            bar.advance()
    assert shown(console).splitlines() == [
        "training: 30/100  1 s each  70 s left",
        "training: 60/100  1 s each  40 s left",
        "training: 90/100  1 s each  10 s left",
    ]


def test_the_rate_of_a_resumed_run_is_that_of_its_own_steps():
    console, now_s = plain_console(), [0.0]
    sink = ConsoleSink(console, clock=lambda: now_s[0])
    with sink.progress("training", total=100, completed=90) as bar:
        for _ in range(4):
            now_s[0] += 15.0
            bar.advance()
    assert shown(console).splitlines() == [
        "training: 92/100  15 s each  120 s left",
        "training: 94/100  15 s each  90 s left",
    ]


def test_numbers_have_four_digits_and_integers_all():
    numbers = [0.0, 0.5, 12.3456, 1234.5, 12345.6, 1e-4, 123456, -2.5e7, float("nan"), float("inf")]
    assert [format_number(number) for number in numbers] == [
        "0.000",
        "0.5000",
        "12.35",
        "1234",
        "1.235e+04",
        "1.00e-04",
        "123456",
        "-2.50e+07",
        "nan",
        "inf",
    ]


def test_names_are_short_as_long_as_they_differ():
    assert short_names(["env/all/reward/total", "time/total", "loss"]) == ["reward/total", "time/total", "loss"]
    assert short_names(["a/x/y", "b/x/y"]) == ["a/x/y", "b/x/y"]
