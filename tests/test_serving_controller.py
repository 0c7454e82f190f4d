"""The controller: what it never does, whatever it sees, and what it does where the answer is known."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marsbench.errors import UserError
from marsbench.racing.position_law import PositionLaw
from marsbench.serving.controller import (
    Choice,
    Controller,
    Group,
    Memory,
    Seen,
    Targets,
    decide,
    expected,
    key_of,
    replayed,
)
from marsbench.serving.messages import MethodName, Wishes

FLAT = PositionLaw([1, 4, 16, 64, 256], [0.010, 0.0101, 0.0102, 0.0103, 0.0104])  # positions cost nothing
MILD = PositionLaw([1, 4, 16, 64, 256], [0.010, 0.012, 0.016, 0.030, 0.100])
STEEP = PositionLaw([1, 4, 16, 64, 256], [0.001, 0.004, 0.016, 0.064, 0.256])  # every position costs as much
TARGETS = Targets(per_token=0.02, first_token=0.5)
METHODS: tuple[MethodName, ...] = ("ar", "mars", "mars-verified")

confidences = st.floats(0, 1)
laws = st.lists(st.floats(1e-4, 1), min_size=5, max_size=5).map(
    lambda found: PositionLaw([1, 4, 16, 64, 256], sorted(found))
)


@st.composite
def groups(draw: Any) -> Group:
    method = draw(st.sampled_from(METHODS))
    if method == "ar":
        return Group(method, None, None, 1, draw(st.integers(1, 9)))
    threshold = draw(confidences) if method == "mars" else 1.0
    least = draw(st.none() | st.floats(0, threshold))
    return Group(method, threshold, least, draw(st.integers(1, 16)), draw(st.integers(1, 9)))


@st.composite
def sights(draw: Any) -> list[Seen]:
    """What is seen at decisions one after the other."""
    found, at = [], 0.0
    for _ in range(draw(st.integers(1, 25))):
        at += draw(st.floats(0.001, 1))
        company = draw(st.lists(groups(), max_size=4))
        settled = {
            group.key(0.0): [(group.widest, draw(st.integers(1, group.widest)), draw(st.integers(1, 50)))]
            for group in company
        }
        waited = draw(st.floats(0, 3))
        found.append(Seen(at, company, settled, waited, draw(st.floats(0, 0.1)), draw(st.floats(0, 0.5))))
    return found


def run(law: PositionLaw, seen: list[Seen], targets: Targets = TARGETS) -> list[Memory]:
    """The memories after each decision."""
    found = [Memory()]
    for one in seen:
        found.append(decide(law, targets, found[-1], one))
    return found[1:]


def best(memory: Memory, rows: int) -> int:
    """The window in the table for so many rows."""
    return memory.choice.at(rows)[0]


def used(memory: Memory, rows: int) -> int:
    """The window that rows have, a trial's included."""
    return memory.choice.trial or best(memory, rows)


TABLES = st.tuples(st.integers(1, 9), st.integers(1, 16), confidences).map(lambda line: (line,))


@example(0.95703125, 0.0, 4, "mars", Choice(((1, 4, 0.5),)))  # more digits than a notch has
@given(
    confidences, st.none() | confidences, st.integers(1, 16), st.sampled_from(METHODS),
    st.builds(Choice, TABLES, confidences, st.integers(0, 16)),
)  # fmt: skip
def test_tau_is_lowered_only_as_far_as_a_request_allows(
    tau: float, least: float | None, widest: int, method: MethodName, choice: Choice
) -> None:
    """Guards against a request that fixes tau and gets another, whatever a controller may have chosen."""
    knob = choice.knob(Wishes(method, tau, least), tau, widest, 4)
    assert knob.threshold is not None and 1 <= knob.window <= widest
    if least is None or choice.relief == 0:
        assert knob.threshold == tau and knob.verified == (method == "mars-verified")
    elif method == "mars-verified":
        assert knob.verified or least <= knob.threshold < 1
    else:
        assert min(least, tau) <= knob.threshold <= tau and not knob.verified


@settings(deadline=None, max_examples=40)
@given(laws, sights())
def test_choices_stay_within_bounds(law: PositionLaw, seen: list[Seen]) -> None:
    """Guards against windows wider than anybody allows, and relief that nobody has asked for."""
    for one, memory in zip(seen, run(law, seen), strict=True):
        choice = memory.choice
        assert 0 <= choice.relief <= 1
        if one.groups:
            widest = max(group.widest for group in one.groups)
            assert all(1 <= window <= widest and 0 <= prune <= 0.95 for _, window, prune in choice.table)
            assert choice.trial <= widest
    assert all(memory.choice.relief == 0 for memory in run(law, seen, Targets()))


@settings(deadline=None, max_examples=40)
@given(st.floats(0, 1), st.integers(1, 16), laws)
def test_it_is_never_slower_than_ar_by_what_it_knows(right: float, rows: int, law: PositionLaw) -> None:
    """Guards against windows that cost more than they settle, at any price of positions and any acceptance."""
    group = Group("mars-verified", 1.0, None, 8, rows)
    times = 40
    memory = Memory()
    for step in range(30):
        settled = _settled(used(memory, rows), right, times)
        memory = decide(law, Targets(), memory, Seen(float(step), [group], {group.key(0): settled}, busy_s=1.0))
    rates, window = memory.rates.get(group.key(0), [0.6]), best(memory, rows)
    each = expected(rates, window)
    positions = each + window - 1 if window > 1 else 1
    assert each * law.seconds_at(rows) >= law.seconds_at(rows * positions) * (1 - 1e-9)


def _settled(window: int, right: float, times: int) -> list[tuple[int, int, int]]:
    """What windows settle of which each guess counts with probability `right`, rounded to whole rows."""
    alive, found = float(times), []
    for tokens in range(1, window + 1):
        ended = alive * (1 - right) if tokens < window else alive
        found.append((window, tokens, round(ended)))
        alive -= ended
    return [one for one in found if one[2]]


def test_an_unlikely_draft_is_left_out_where_positions_are_free() -> None:
    """Guards against drafts that are likelier wrong than right, which take the next forward's drafts with them."""
    group, memory = Group("mars-verified", 1.0, None, 4, 1), Memory()
    for step in range(30):
        settled = {group.key(0): _settled(used(memory, 1), 0.6, 20)}
        memory = decide(FLAT, Targets(), memory, Seen(float(step), [group], settled, busy_s=1.0))
    window, prune = memory.choice.at(1)
    each = expected(memory.rates[group.key(0)], window)
    assert window == 4 and prune == pytest.approx((each - 1) / each, abs=0.06)


@pytest.mark.parametrize(("law", "window"), [(FLAT, 8), (STEEP, 1)])
def test_the_window_is_what_the_law_says(law: PositionLaw, window: int) -> None:
    """Guards against a controller that drafts as much on a machine that positions cost dearly as on one they do not."""
    group, memory = Group("mars-verified", 1.0, None, 8, 4), Memory()
    windows = []
    for step in range(60):
        settled = {group.key(0): _settled(used(memory, 4), 0.9, 20)}
        memory = decide(law, Targets(), memory, Seen(float(step), [group], settled, busy_s=1.0))
        windows.append(best(memory, 4))
    assert windows[-1] == window
    assert sum(one != other for one, other in pairwise(windows)) <= 4


def test_ar_is_tried_against_now_and_then() -> None:
    """Guards against a window of 1 that nothing ever leads out of, since it shows no guesses."""
    group, memory = Group("mars-verified", 1.0, None, 8, 4), Memory()
    for step in range(40):  # guesses count for nothing
        settled = {group.key(0): _settled(used(memory, 4), 0.0, 20)}
        memory = decide(MILD, Targets(), memory, Seen(float(step), [group], settled, busy_s=1.0))
    assert best(memory, 4) == 1
    for step in range(40, 400):  # and now they count
        settled = {group.key(0): _settled(used(memory, 4), 0.95, 20)}
        memory = decide(MILD, Targets(), memory, Seen(float(step), [group], settled, busy_s=1.0))
    assert best(memory, 4) >= 4


def test_a_step_in_load_turns_tau_a_bounded_number_of_times() -> None:
    """Guards against a tau that swings: down by notches while too much waits, up again when it does not, and rest."""
    group = Group("mars", 0.9, 0.5, 4, 8)
    seen = []
    for step in range(600):
        at, busy = step * 0.05, 100 <= step < 300
        seen.append(Seen(at, [group], {}, 2.0 if busy else 0.0, 0.01, 0.05))
    reliefs = [memory.choice.relief for memory in run(FLAT, seen)]
    assert reliefs[99] == 0 and reliefs[299] == pytest.approx(0.4) and reliefs[-1] == 0
    assert sum(one != other for one, other in pairwise(reliefs)) == 8  # four notches down, four up
    nobody = Group("mars", 0.9, None, 4, 8)
    assert {memory.choice.relief for memory in run(FLAT, [Seen(one.at_s, [nobody], {}, 9.0, 9.0) for one in seen])} == {
        0
    }


def test_what_every_step_takes_makes_wide_windows_pay() -> None:
    """Guards against a law of forwards alone, where most of a step is something else."""
    group = Group("mars-verified", 1.0, None, 6, 8)
    settled = {"mars-verified": [(6, 6, 50)]}
    plain, busy = (
        best(run(STEEP, [Seen(1.0, [group], settled, steps=steps)])[0], 8) for steps in ((), [(True, 1.0, 16.0)])
    )
    assert plain < busy == 6


@pytest.mark.parametrize("dear", [False, True])
def test_ar_is_chosen_where_windows_cost_more_than_the_law_says(dear: bool) -> None:
    """Guards against a law of short contexts, by which windows pay that do not: what positions cost is only known where
    steps of few are tried too.
    """
    group, memory = Group("mars-verified", 1.0, None, 4, 16), Memory()
    windows = []
    for step in range(400):
        window = used(memory, 16)
        settled = _settled(window, 0.7, 20)
        each = sum(tokens * times for _, tokens, times in settled) / sum(times for *_, times in settled)
        positions = 16.0 if window == 1 else 16 * (each + window - 1)
        seconds = MILD.seconds_at(positions) + (0.001 * positions if dear else 0.002)
        seen = Seen(float(step), [group], {group.key(0): settled}, busy_s=1.0, steps=[(window > 1, seconds, positions)])
        memory = decide(MILD, Targets(), memory, seen)
        windows.append(best(memory, 16))
    assert set(windows[100:]) == ({1} if dear else {3})


@pytest.mark.parametrize("reading", [0.0, 0.006])
def test_what_windows_take_beyond_their_positions_is_not_taken_for_a_steps(reading: float) -> None:
    """Guards against guesses that cost more to read than they settle, hidden in a fit to all steps alike: by that, AR
    takes as long.
    """
    memory, windows = Memory(), []
    for step in range(400):
        group = Group("mars-verified", 1.0, None, 2, 4 + 12 * (step % 2))
        window = used(memory, group.rows)
        positions = group.rows * (1 if window == 1 else 2.6)
        seconds = MILD.seconds_at(positions) + (reading if window > 1 else 0.0)
        settled = {group.key(0): _settled(window, 0.6, 20)}
        seen = Seen(0.1 * step, [group], settled, busy_s=0.1, steps=[(window > 1, seconds, positions)])
        memory = decide(MILD, Targets(), memory, seen)
        windows.append(best(memory, group.rows))
    assert set(windows[100:]) == ({1} if reading else {2})


def test_a_trial_lasts_until_it_is_seen() -> None:
    """Guards against AR tried for a step in which rows still carry what they had drafted, and judged by that."""
    group, memory = Group("mars-verified", 1.0, None, 4, 4), Memory()
    settled = {group.key(0): _settled(4, 0.9, 20)}
    tried = []
    for step in range(4):
        kind = step == 2
        steps = [(not kind, 0.02, 4.0 if kind else 16.0)]
        memory = decide(FLAT, Targets(), memory, Seen(0.1 * step, [group], settled, busy_s=0.1, steps=steps))
        tried.append(used(memory, 4))
    assert tried == [1, 1, 4, 4] and best(memory, 4) == 4


def test_trials_take_no_more_than_their_share() -> None:
    """Guards against trials that follow each other by decisions: rows that come and go make many of these."""
    group, memory = Group("mars-verified", 1.0, None, 8, 8), Memory()
    taken, at = {True: 0.0, False: 0.0}, 0.0
    for _ in range(4000):  # a decision at every step
        window = used(memory, 8)
        seconds = STEEP.seconds_at(8.0 if window == 1 else 8 * (2 * window - 1))
        taken[memory.choice.trial > 0] += seconds
        at += seconds
        settled = {group.key(0): _settled(window, 0.2, 20)}
        memory = decide(
            STEEP,
            Targets(),
            memory,
            Seen(at, [group], settled, busy_s=seconds, steps=[(window > 1, seconds, 8.0)]),
        )
    assert best(memory, 8) == 1 and 0 < taken[True] <= 0.05 * at


def test_waiting_near_the_target_turns_nothing() -> None:
    """Guards against a tau that flutters where the load is just what can be carried."""
    group = Group("mars", 0.9, 0.5, 4, 8)
    seen = [Seen(step * 0.05, [group], {}, 0.45 - 0.1 * (step % 2), 0.015, 0.05) for step in range(400)]
    assert {memory.choice.relief for memory in run(FLAT, seen)} == {0}


@settings(deadline=None, max_examples=20)
@given(laws, sights())
def test_a_log_replays_to_the_same_choices(
    tmp_path_factory: pytest.TempPathFactory, law: PositionLaw, seen: list[Seen]
) -> None:
    """Guards against decisions that depend on what the log does not hold."""
    log = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    for _ in range(2):  # an engine that was started again writes on
        controller = Controller(law, TARGETS, log)
        for one in seen:
            controller._decide(one)
    found = list(replayed(log))
    assert len(found) == 2 * len(seen) and all(then == now for _, then, now in found)


def test_a_changed_log_is_found_out(tmp_path: Path) -> None:
    """Guards against a replay that agrees with anything."""
    log = tmp_path / "decisions.jsonl"
    controller = Controller(STEEP, TARGETS, log)
    controller._decide(Seen(1.0, [Group("mars", 0.9, 0.1, 4, 2)], {key_of("mars", 0.9, False): [(4, 2, 9)]}, 9.0, 0.0))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[1]["choice"][0][0][1] += 1
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [then == now for _, then, now in replayed(log)] == [False]
    log.write_text(json.dumps({name: value for name, value in lines[0].items() if name != "format"}) + "\n")
    with pytest.raises(UserError, match="no decision of today's"):
        list(replayed(log))
    log.write_text('{"something": "else"}\n')
    with pytest.raises(UserError, match="no decision of today's"):
        list(replayed(log))


@settings(deadline=None, max_examples=40)
@example(0.75, [0.0, 0.0, 0.0, 0.0, 1.0], FLAT)  # found with a tau taken for known of which AR alone had been seen
@given(
    st.floats(0.3, 0.99), st.lists(st.floats(0, 1), min_size=5, max_size=5).map(sorted), st.sampled_from([FLAT, MILD])
)
def test_under_pressure_it_comes_to_the_fastest_of_what_is_allowed(
    checked: float, passing: list[float], law: PositionLaw
) -> None:
    """Guards against a tau lowered for less speed: what passes a high tau is less than what checking lets pass."""
    group, memory = Group("mars-verified", 1.0, 0.5, 4, 8), Memory()
    counts = {group.key(0.0): checked} | {f"mars {0.9 - 0.1 * place:.2f}": rate for place, rate in enumerate(passing)}
    for step in range(300):
        relief = memory.choice.relief
        settled = {group.key(relief): _settled(used(memory, 8), counts[group.key(relief)], 400)}
        seen = Seen(0.05 * step, [group], settled, 9.0, 9.0, 0.05)
        memory = decide(law, TARGETS, memory, seen)
    assert memory.allowed == pytest.approx(0.5) and 0 <= memory.choice.relief <= memory.allowed

    def speed(right: float) -> float:
        each = [expected([right] * 3, window) for window in range(1, 5)]
        return max(
            tokens / law.seconds_at(8 * (tokens + window - 1) if window > 1 else 8)
            for window, tokens in enumerate(each, 1)
        )

    assert speed(counts[group.key(memory.choice.relief)]) >= 0.93 * max(map(speed, counts.values()))


def test_relief_ends_by_itself() -> None:
    """Guards against a tau that stays lowered after a burst, where a token alone takes most of its target."""
    group = Group("mars", 0.9, 0.5, 4, 8)
    burst = [Seen(0.05 * step, [group], {}, 2.0, 0.016, 0.05) for step in range(100)]
    after = [Seen(5 + 0.05 * step, [group], {}, 0.0, 0.016, 0.05) for step in range(1000)]
    reliefs = [0.0, *(memory.choice.relief for memory in run(FLAT, burst + after))]
    assert reliefs[100] == pytest.approx(0.4) and reliefs[-1] == 0
    assert sum(one != other for one, other in pairwise(reliefs)) == 8


def test_who_comes_after_an_hour_finds_nothing_of_it() -> None:
    """Guards against a lone request that starts with what a burst an hour ago made necessary, or by its guesses."""
    group = Group("mars", 0.9, 0.5, 4, 8)
    settled = {group.key(0.0): [(4, 4, 50)]}
    busy = [Seen(0.05 * step, [group], settled, 2.0, 0.016, 0.05) for step in range(100)]
    *_, last, woken = run(FLAT, [*busy, Seen(3600.0, [], {})])
    assert last.choice.relief == pytest.approx(0.4) and woken.choice.relief == 0
    assert last.rates and not woken.rates


@settings(deadline=None, max_examples=10)
@given(laws, st.floats(0, 1), st.integers(1, 16))
def test_trials_never_take_more_than_their_share(law: PositionLaw, right: float, rows: int) -> None:
    """Guards against trials that cost more than a twentieth of the time, whatever steps take and guesses bring."""
    group, memory = Group("mars-verified", 1.0, None, 8, rows), Memory()
    taken, at = {True: 0.0, False: 0.0}, 0.0
    for _ in range(300):
        window = used(memory, rows)
        settled = _settled(window, right, 20)
        each = sum(tokens * times for _, tokens, times in settled) / sum(times for *_, times in settled)
        positions = rows * (each + window - 1) if window > 1 else float(rows)
        seconds = law.seconds_at(positions)
        for _ in range(3 if memory.choice.trial else 8):
            taken[memory.choice.trial > 0] += seconds
            at += seconds
        steps = [(window > 1, seconds, positions)]
        busy = seconds * (3 if memory.choice.trial else 8)
        memory = decide(law, Targets(), memory, Seen(at, [group], {group.key(0): settled}, busy_s=busy, steps=steps))
    dearest = 6 * law.seconds_at(rows * 8)  # the first two, before there was any time to take a share of
    assert taken[True] <= 0.05 * at + dearest


def test_the_table_says_what_pays_at_every_number_of_rows() -> None:
    """Guards against one window for all loads, and rows that come and go without its being turned."""
    law = PositionLaw([1, 4, 16, 64], [0.010, 0.0105, 0.012, 0.060])  # positions are free up to some
    group, memory = Group("mars-verified", 1.0, None, 4, 2), Memory()
    for step in range(60):
        settled = {group.key(0): _settled(used(memory, 2), 0.7, 20)}
        memory = decide(law, Targets(), memory, Seen(float(step), [group], settled, busy_s=1.0))
    windows = [best(memory, rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
    assert windows == sorted(windows, reverse=True) and windows[0] == 4 and windows[-1] == 1
