"""Which window and threshold to use: the acceptance of each setting measured once, its speed by the position law."""

from dataclasses import dataclass
from statistics import fmean

from marsbench.line import Line
from marsbench.provenance import others_cores, warning
from marsbench.racing.course import Course
from marsbench.racing.grid import Grid
from marsbench.racing.position_law import Work, law_of, predicted_seconds
from marsbench.racing.race import RoundLog
from marsbench.running.run import Run
from marsbench.statistics.intervals import Estimate
from marsbench.training.checkpoints import Loaded

THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
_ROWS = 16  # decoded at once while acceptance is measured
_LAPS = 3  # of the race that checks the recommendation


@dataclass(frozen=True)
class Setting:
    contender: Line
    tokens_per_forward: float
    points_lost: float  # of accuracy against `ar`
    speed_up: float  # over `ar` at the wanted batch size, by the position law


@dataclass(frozen=True)
class Advice:
    """The settings, the fastest expected first, the one expected to be the best, and what a race says of it."""

    settings: list[Setting]
    expected: Setting
    raced: Estimate | None  # its speed-up over `ar`; None where it is `ar` itself

    def summary(self, batch_size: int, max_points_lost: float) -> str:
        points = "1 point" if max_points_lost == 1 else f"{max_points_lost:g} points"
        best, condition = self.expected, f"at batch size {batch_size}, losing at most {points}"
        ar, fast = f"{condition}: --method ar", f"{best.speed_up:.2f} times"
        if self.raced is None:
            return f"{ar}\nnothing is expected to be faster"
        raced = f"{self.raced.value:.2f} [{self.raced.interval.low:.2f}, {self.raced.interval.high:.2f}]"
        if self.raced.value <= 1:
            return f"{ar}\n{best.contender.name} was expected to be {fast} as fast, and raced {raced}"
        its = f"{best.tokens_per_forward:.2f} tokens/forward, {best.points_lost:+.1f} points lost on these questions"
        return f"{condition}: {best.contender.typed}\nexpected {fast} ar, raced {raced}; {its}"


def candidates(block_size: int) -> tuple[Line, ...]:
    windows = sorted({2, 3, 4, 5, block_size, block_size + 1, block_size + 2})
    linear = [{"layout": "linear", "window": window, "threshold": 0.5} for window in windows]
    groups = [{"layout": "groups", "window": window} for window in windows if window <= block_size]
    return (
        Line.named("ar", "", "ar"),
        *[Line.named(f"mars, tau = {tau:g}", "", "mars", block_size=block_size, threshold=tau) for tau in THRESHOLDS],
        *[
            Line.named(", ".join(["mars-verified", *[f"{name} = {value}" for name, value in how.items()]]), "",
                       "mars-verified", **how)
            for how in (*linear, *groups)
        ],
    )  # fmt: skip


def tune(
    run: Run, loaded: Loaded, *, block_size: int, batch_size: int, prompts: int, max_points_lost: float, positions: int
) -> Advice:
    """Recommend a setting that loses at most so many points against `ar`; forwards of so many positions are timed."""
    grid = Grid(candidates(block_size), (batch_size,), prompts, _LAPS, timeout_s=float("inf"), positions=positions)
    course, reporter = Course(run, grid, lambda *_: loaded), run.reporter
    watched = course.race(course.cells(_ROWS), laps=0)  # refuses what cannot decode so, before anything is timed
    reporter.say_once(warning(others_cores()))
    times = course.step_times()
    law = law_of(times["rows"], times["window"], times["seconds"])
    with reporter.bar(f"measuring the acceptance of {len(grid.contenders)} settings") as bar:
        outcomes = watched.run(RoundLog(), bar.update)
    settings, base = list[Setting](), None
    for line in grid.contenders:
        if (outcome := outcomes[line.name]).status == "done":
            forwards, meter = [generation.forwards for generation in outcome.generations], outcome.meter
            work = Work(outcome.emitted, forwards, meter.positions, meter.prompt_positions)
            speed = work.emitted / predicted_seconds(law, work, batch_size)
            right = fmean(course.questions.score(course.responses(outcome)))  # as many of every benchmark
            base = base or (speed, right)  # of `ar`, which stands first
            tokens = outcome.emitted / outcome.row_forwards
            settings.append(Setting(line, tokens, 100 * (base[1] - right), speed / base[0]))
    settings.sort(key=lambda setting: -setting.speed_up)
    best = next(setting for setting in settings if setting.points_lost <= max_points_lost)
    if best.contender == course.plain:
        return Advice(settings, best, None)
    pair = [cell for cell in course.cells(batch_size) if cell.line in (course.plain, best.contender)]
    with reporter.bar(f"racing {best.contender.name} against ar") as bar:
        raced = course.race(pair).run(RoundLog(), bar.update)
    return Advice(settings, best, raced[best.contender.name].speed_over(raced["ar"]))
