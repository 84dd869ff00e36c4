import io

import pytest
from rich.console import Console
from rich.panel import Panel

from xlashard.train.loop.console import Pace, Screen


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)


def paced(steps: int, seconds: float, done: int) -> Pace:
    clock = Clock()
    pace = Pace(tokens=1000, steps=steps, clock=clock)
    for number in range(1, done + 1):
        pace.mark(number)
        clock.now += seconds
    return pace


def test_the_first_step_reports_no_speed() -> None:
    pace = paced(steps=10, seconds=2.0, done=1)
    assert (pace.seconds, pace.rate, pace.left) == (None, None, None)
    assert str(pace) == "measuring speed"


def test_pace_counts_tokens_and_time_left() -> None:
    pace = paced(steps=200, seconds=0.5, done=20)
    assert pace.seconds == 0.5
    assert pace.rate == 2000
    assert pace.left == 90
    assert str(pace) == "2,000 tokens/s · 1:30 left"


def test_pace_ignores_old_steps() -> None:
    clock = Clock()
    pace = Pace(tokens=1, steps=1000, clock=clock)
    for number in range(1, 201):
        clock.now += 10.0 if number < 100 else 1.0
        pace.mark(number)
    assert pace.seconds == 1.0


@pytest.mark.parametrize("terminal", [True, False])
def test_screen_draws_a_bar_only_in_a_terminal(terminal: bool) -> None:
    out = console(terminal)
    screen = Screen(out, 1)
    screen.begin(10)
    screen.step(1, 1.5, paced(10, 1.0, 1))
    screen.end()
    shown = out.file.getvalue()
    assert ("\x1b[?25l" in shown, "1/10" in shown) == (terminal, True)
    assert ("step  1/10" in shown) != terminal


def test_plain_output_is_lines_at_the_first_last_and_every_few_steps() -> None:
    out = console(False)
    screen = Screen(out, every=4)
    screen.begin(10)
    for done in range(1, 11):
        screen.step(done, 1.5, paced(10, 1.0, done))
    screen.end()
    lines = out.file.getvalue().splitlines()
    assert [line.split("·")[0].strip() for line in lines] == [
        "step  1/10",
        "step  4/10",
        "step  8/10",
        "step 10/10",
    ]
    assert lines[1].endswith("loss 1.5000 · 1,000 tokens/s · 0:06 left")


@pytest.mark.parametrize("text", ["a [bold]path[/bold]", "x" * 300, "[/]"])
def test_text_is_printed_verbatim(text: str) -> None:
    out = console(False)
    Screen(out, 1).show(text)
    assert out.file.getvalue() == text + "\n"


def test_plain_output_has_no_control_codes() -> None:
    out = console(False)
    screen = Screen(out, 1)
    screen.show(Panel("text"))
    screen.begin(1)
    screen.step(1, 1.0, paced(1, 1.0, 1))
    assert "\x1b" not in out.file.getvalue()


def test_a_terminal_shows_a_bar_with_loss_speed_and_time_left() -> None:
    out = console(True)
    screen = Screen(out, 1)
    screen.begin(40)
    screen.show("above the bar")
    screen.step(20, 2.3456, paced(40, 0.5, 20))
    screen.end()
    shown = out.file.getvalue()
    for part in ("above the bar", "20/40", "2.3456", "2,000 tokens/s", "0:10 left"):
        assert part in shown
    # The cursor, hidden while the bar moves, is back.
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_screen_end_is_allowed_before_begin_and_twice() -> None:
    screen = Screen(console(True), 1)
    screen.end()
    screen.begin(1)
    screen.end()
    screen.end()
    screen.step(1, 1.0, paced(1, 1.0, 1))
    screen.show("still here")
