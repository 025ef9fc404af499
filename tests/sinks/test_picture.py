from __future__ import annotations

import doctest
import io
import math
import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFont
from PIL._util import DeferredError

from lowmem_grpo.sinks import picture
from lowmem_grpo.sinks.picture import (
    HEIGHT,
    ROW_PX,
    WIDTH,
    Scale,
    draw_picture,
    lay_out,
    nice_ticks,
    running_mean,
    smoothing_window,
)
from tests.sinks.examples import REPORT

Rows = list[dict[str, Any]]

TITLE_BAND = (0, 24, WIDTH, 68)
UPPER = (93, 158, 742, 390)
LOWER = (93, 448, 742, 588)
RIGHT = (820, 176, WIDTH, 540)


def rows(rewards: list[float], **columns: list[float]) -> Rows:
    """Rows of metrics.jsonl from step 1 on; `eval__score=[...]` fills another column from its first row on."""
    table: Rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    for name, values in columns.items():
        for row, value in zip(table, values, strict=False):
            row[name.replace("__", "/")] = value
    return table


def draw(metrics: Rows, report: dict[str, Any] | None = None, title: str = "quickstart") -> Image.Image:
    image = Image.open(io.BytesIO(draw_picture(metrics, REPORT if report is None else report, title=title)))
    image.load()
    return image


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def inked(image: Image.Image, colour: str, box: tuple[int, int, int, int], tolerance: int = 6) -> list[tuple[int, int]]:
    """The (x, y) in `box` that are painted in `colour`."""
    pixels = np.asarray(image.convert("RGB").crop(box), dtype=int)
    ys, xs = np.nonzero((np.abs(pixels - rgb(colour)) <= tolerance).all(axis=2))
    return [(box[0] + x, box[1] + y) for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]


def same(a: Image.Image, b: Image.Image, box: tuple[int, int, int, int]) -> bool:
    return a.crop(box).tobytes() == b.crop(box).tobytes()


# --------------------------------------------------------------------------------------------- numbers


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(picture)
    assert result.attempted == 6 and result.failed == 0


def test_ticks() -> None:
    assert nice_ticks(0, 60, 6, whole=True) == [(float(n), str(n)) for n in range(0, 61, 10)]
    assert nice_ticks(0.5, 1.5, 6, whole=True) == [(1.0, "1")]
    assert [text for _, text in nice_ticks(-0.03, 0.03, 3)] == ["-0.02", "0.00", "0.02"]
    assert [text for _, text in nice_ticks(0, 3e7, 3)] == ["0", "1e+07", "2e+07", "3e+07"]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(3, 8))
def test_ticks_are_even_inside_and_about_as_many_as_wanted(low: float, span: float, wanted: int) -> None:
    values = [value for value, _ in nice_ticks(low, low + span, wanted)]
    assert wanted / 2.5 - 1 <= len(values) <= wanted + 1
    assert all(low - span * 1e-6 <= value <= low + span * (1 + 1e-6) for value in values)
    gaps = [b - a for a, b in pairwise(values)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


@given(st.lists(st.floats(-1e3, 1e3), max_size=40), st.sampled_from([1, 3, 5, 11]))
def test_the_running_mean_is_the_mean_of_the_window(values: list[float], window: int) -> None:
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    assert running_mean(values, window) == pytest.approx([sum(part) / len(part) for part in parts], abs=1e-9)


@given(st.integers(0, 10_000))
def test_the_window_is_odd_and_at_most_the_number_of_points(n: int) -> None:
    assert smoothing_window(n) % 2 == 1 and smoothing_window(n) <= max(1, n)


# --------------------------------------------------------------------------------------------- the whole


def test_a_png_of_the_stated_size_with_round_corners() -> None:
    data = draw_picture(rows([0.0, 1.0]), REPORT, title="quickstart")
    image = Image.open(io.BytesIO(data))
    assert (image.format, image.size, image.mode) == ("PNG", (1200, 675), "RGBA")
    assert image.size == (WIDTH, HEIGHT)
    assert image.getpixel((0, 0)) == (0, 0, 0, 0)
    assert image.getpixel((600, 5)) == (*rgb(picture.PAPER), 255)


def test_equal_input_gives_equal_bytes() -> None:
    metrics = rows([0.1, 0.4, 0.3], eval__score=[0.2], groups__zero_variance=[0.5, 0.25])
    once = draw_picture(metrics, REPORT, title="a")
    assert draw_picture(metrics, REPORT, title="a") == once
    assert draw_picture(metrics, REPORT, title="b") != once


def test_drawing_is_light_to_import() -> None:
    code = (
        "import sys, lowmem_grpo.sinks.picture; print([m for m in ('PIL', 'torch', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# --------------------------------------------------------------------------------------------- the curves


def test_the_smoothed_line_passes_through_the_running_means() -> None:
    noise = random.Random(0)
    rewards = [step / 50 + noise.uniform(-0.3, 0.3) for step in range(60)]
    image, layout = draw(rows(rewards)), lay_out(rows(rewards), REPORT)
    means = running_mean(rewards, 7)
    for step in (4, 20, 40, 57):
        x = round(layout.steps.px(step))
        ys = [y for _, y in inked(image, picture.REWARD, (x, UPPER[1], x + 1, UPPER[3]), 40)]
        assert min(ys) - 1 <= layout.reward.px(means[step - 1]) <= max(ys) + 2
        assert len(ys) <= 12


def test_a_rising_curve_is_higher_on_the_right_and_a_falling_one_on_the_left() -> None:
    def middle(image: Image.Image, left: int, right: int) -> float:
        ys = [y for _, y in inked(image, picture.REWARD, (left, UPPER[1], right, UPPER[3]))]
        return sum(ys) / len(ys)

    rewards = [0.2 + 0.02 * step + 0.1 * (-1) ** step for step in range(60)]
    rising, falling = draw(rows(rewards)), draw(rows(rewards[::-1]))
    assert middle(rising, 93, 200) > middle(rising, 640, 742) + 100
    assert middle(falling, 93, 200) < middle(falling, 640, 742) - 100


def test_steps_are_spread_over_the_whole_width() -> None:
    layout = lay_out([{"step": 1, "reward/mean": 0.0}, {"step": 10, "reward/mean": 1.0}], {})
    assert layout.steps == Scale(0.5, 10.5, 92, 742)
    assert layout.steps.px(1) == 92 + 32.5 and layout.steps.px(10) == 742 - 32.5
    assert layout.reward == Scale(-0.06, 1.06, 382, 166)


def test_a_flat_line_lies_in_the_middle() -> None:
    for value in (0.0, 0.5, -3.0, 1e20):
        ys = {y for _, y in inked(draw(rows([value] * 5)), picture.REWARD, UPPER)}
        assert ys and all(abs(y - (166 + 382) / 2) <= 3 for y in ys)


def test_one_step_is_a_point() -> None:
    hits = inked(draw(rows([0.3])), picture.REWARD, UPPER)
    assert 60 < len(hits) < 200
    assert all(abs(x - 417) <= 7 and abs(y - 274) <= 7 for x, y in hits)


def test_what_was_not_measured_is_left_out() -> None:
    gaps = draw_picture([{"step": 1, "reward/mean": 0.1}, {"step": 2}, {"step": 3, "reward/mean": 0.4}], {}, title="")
    for missing in (math.nan, math.inf, -math.inf, None, "none", 10**400):
        table: Rows = rows([0.1, missing, 0.4], eval__score=[missing])  # type: ignore[list-item]
        assert draw_picture(table, {"peak_memory_bytes": missing, "seconds": missing}, title="") == gaps


def test_rows_without_a_step_count_by_their_place() -> None:
    bare = [{"reward/mean": 0.1}, {"reward/mean": 0.4}]
    assert draw_picture(bare, {}, title="") == draw_picture(rows([0.1, 0.4]), {}, title="")


def test_many_steps_are_thinned_to_columns_that_show_their_range() -> None:
    noise = random.Random(0)
    rewards = [noise.uniform(0, 1) for _ in range(5000)]
    image = draw(rows(rewards))
    pale = inked(image, picture.REWARD_PALE, UPPER)
    by_x = {x: [y for at, y in pale if at == x] for x in range(100, 735, 25)}
    # About 15 steps a column: their range covers most of 0 to 1, which is 193 pixels high.
    assert all(max(ys) - min(ys) > 100 for ys in by_x.values())
    line = inked(image, picture.REWARD, UPPER)
    assert len({x for x, _ in line}) > 600  # thinning leaves the line in one piece
    assert all(abs(y - 274) < 20 for _, y in line)
    bare = draw([], REPORT)
    assert same(image, bare, (0, 0, WIDTH, 60)) and same(image, bare, (812, 118, WIDTH, HEIGHT))


def test_negative_rewards_are_drawn() -> None:
    layout = lay_out(rows([-4.0, -2.0]), {})
    assert layout.reward.px(-4.0) > layout.reward.px(-2.0)
    assert len(inked(draw(rows([-4.0, -2.0])), picture.REWARD, UPPER)) > 500


# --------------------------------------------------------------------------------------------- the lower panel


def test_more_dead_groups_are_more_ink_in_the_lower_panel_alone() -> None:
    few = draw(rows([0.1, 0.2], groups__zero_variance=[0.25, 0.25]))
    many = draw(rows([0.1, 0.2], groups__zero_variance=[0.75, 0.75]))
    ink = [len(inked(image, picture.DEAD, LOWER)) for image in (few, many)]
    assert ink[1] == pytest.approx(3 * ink[0], rel=0.06)
    assert same(few, many, (0, 0, WIDTH, 440)) and not same(few, many, LOWER)


def test_a_bar_of_dead_groups_is_as_high_as_their_share() -> None:
    image = draw(rows([0.1], groups__zero_variance=[0.5]))
    ys = [y for _, y in inked(image, picture.DEAD, (410, 448, 411, 590))]
    # 0 to 1 with 4 % of room at both ends on 132 pixels: a half is 61 of them.
    assert len(ys) == pytest.approx(61, abs=2) and max(ys) == pytest.approx(588 - 132 * 0.04 / 1.08, abs=2)


@pytest.mark.parametrize("scores", [[0.1, 0.9], [-3.0, 40.0], [7.0, 7.0]])
def test_dev_scores_are_marked_points(scores: list[float]) -> None:
    metrics = rows([0.1, 0.2], eval__score=scores, groups__zero_variance=[0.5, 0.5])
    image, layout = draw(metrics), lay_out(metrics, REPORT)
    for step, score in enumerate(scores, 1):
        at = (round(layout.steps.px(step)), round(layout.dev.px(score)))
        assert image.getpixel(at) == (*rgb(picture.TUNED), 255)
        assert 448 < at[1] < 588
    assert layout.dead == Scale(-0.04, 1.04, 588, 456)
    assert (layout.dev == layout.dead) == (max(scores) <= 1)


def test_without_dev_scores_the_dead_groups_have_the_panel() -> None:
    image = draw(rows([0.1, 0.2], groups__zero_variance=[0.5, 0.25]))
    assert inked(image, picture.DEAD, LOWER) and not inked(image, picture.TUNED, LOWER)
    assert inked(image, picture.DEAD_DARK, (30, 448, 92, 600), 40)  # its axis is on the left now
    assert not inked(image, picture.DEAD_DARK, (743, 448, 811, 600), 40)


# --------------------------------------------------------------------------------------------- early stop


def test_an_early_stop_is_marked_at_the_best_step() -> None:
    metrics = rows([0.1 * step for step in range(10)], eval__score=[0.5])
    report = {**REPORT, "best_step": 5}
    early, to_the_end = draw(metrics, {**report, "stopped_early": True}), draw(metrics, report)
    x = round(lay_out(metrics, report).steps.px(5))
    changed = [
        (column, y)
        for column, y in inked(early, picture.INK, (93, 150, 742, 590), 60)
        if early.getpixel((column, y)) != to_the_end.getpixel((column, y))
    ]
    dashes = [(column, y) for column, y in changed if abs(column - x) <= 1]
    words = [(column, y) for column, y in changed if abs(column - x) > 1]
    assert len({y for _, y in dashes}) > 100
    assert words and all(388 < y < 412 for _, y in words)


@pytest.mark.parametrize("best", [None, 0, 11, math.nan])
def test_no_mark_without_a_best_step_on_the_axis(best: float | None) -> None:
    metrics = rows([0.1] * 10)
    early = draw_picture(metrics, {**REPORT, "best_step": best, "stopped_early": True}, title="")
    assert early == draw_picture(metrics, REPORT, title="")


@pytest.mark.parametrize("best", [1, 10])
def test_the_word_at_an_edge_stays_between_the_axes(best: int) -> None:
    image = draw(rows([0.1] * 10), {**REPORT, "best_step": best, "stopped_early": True})
    xs = [x for x, _ in inked(image, picture.INK, (0, 389, 812, 411), 60)]
    assert min(xs) >= 91 and max(xs) <= 743


# --------------------------------------------------------------------------------------------- start against tuned


def whisker(image: Image.Image, colour: str, y: float) -> list[int]:
    """The x at which a line through the whisker's caps, but not through its middle, is painted."""
    return [x for x, _ in inked(image, colour, (895, round(y) + 3, 1090, round(y) + 4), 30)]


def test_whiskers_end_at_the_interval() -> None:
    image, measure = draw(rows([0.1])), lay_out(rows([0.1]), REPORT).measures[0]
    assert measure.label == "score" and measure.scale == Scale(0.0, 1.0, 898, 1086)
    # start .41 [.345, .48], tuned .77 [.707, .823]; 188 pixels for 0 to 1
    for colour, y, low, high in (
        (picture.START_DARK, measure.y, 898 + 64.9, 898 + 90.2),
        (picture.TUNED_DARK, measure.y + ROW_PX, 898 + 132.9, 898 + 154.7),
    ):
        xs = whisker(image, colour, y)
        assert min(xs) == pytest.approx(low, abs=2) and max(xs) == pytest.approx(high, abs=2)
        assert len(xs) <= 6  # two caps and nothing between


def test_bars_end_at_the_value() -> None:
    image, measure = draw(rows([0.1])), lay_out(rows([0.1]), REPORT).measures[0]
    for colour, y, value in ((picture.START, measure.y, 0.41), (picture.TUNED, measure.y + ROW_PX, 0.77)):
        xs = [x for x, _ in inked(image, colour, (895, round(y) + 7, 1090, round(y) + 8))]
        assert min(xs) == pytest.approx(898, abs=3) and max(xs) == pytest.approx(898 + 188 * value, abs=4)


def test_every_measure_of_the_report_has_its_place() -> None:
    layout = lay_out([], REPORT)
    assert [measure.label for measure in layout.measures] == ["score", "correct", "format"]
    score, correct, form = layout.measures
    assert score.gain is not None and score.gain.interval == (0.28, 0.43)
    assert correct.start is not None and correct.start.interval is None
    assert form.gain is not None and form.gain.value == pytest.approx(0.17) and form.gain.interval is None
    assert not whisker(draw([]), picture.TUNED_DARK, form.y + ROW_PX)
    without = {**REPORT, "start": {"score": 0.1, "format": None}, "tuned": {"score": 0.2, "format": None}}
    assert [measure.label for measure in lay_out([], without).measures] == ["score"]


def test_scores_outside_0_to_1_get_their_own_scale_and_nothing_reaches_the_verdict() -> None:
    start = {"score": -12.5, "interval": [-14, -11], "correct": 2.0, "format": 3.0}
    tuned = {"score": 1234.5, "interval": [1100, 1300], "correct": 4.0, "format": 9.0}
    report = {**REPORT, "start": start, "tuned": tuned}
    measures = lay_out([], report).measures
    assert [(m.scale.low, m.scale.high) for m in measures] == [(-14, 1300), (0, 4), (0, 9)]
    assert measures[-1].y + ROW_PX + 22 + 10 < 545
    image = draw([], report)
    assert not inked(image, picture.DIM, (1168, 130, WIDTH, HEIGHT), 60)
    xs = whisker(image, picture.TUNED_DARK, measures[0].y + ROW_PX)
    assert min(xs) == pytest.approx(898 + 188 * 1114 / 1314, abs=2)


def test_one_side_alone_is_drawn() -> None:
    report = {**REPORT, "start": {}, "difference": None}
    measure = lay_out([], report).measures[0]
    assert measure.start is None and measure.gain is None
    image = draw([], report)
    assert len(inked(image, picture.TUNED, RIGHT)) > 2000 > 100 > len(inked(image, picture.START, RIGHT))


def test_the_verdict_is_green_when_proven_and_amber_when_not() -> None:
    band = (830, 552, 1000, 592)
    proven, not_proven = draw([]), draw([], {**REPORT, "proven": False})
    assert inked(proven, picture.GOOD, band) and not inked(proven, picture.WARN, band)
    assert inked(not_proven, picture.WARN, band) and not inked(not_proven, picture.GOOD, band)


def test_the_longest_verdict_stays_on_the_card() -> None:
    report = {
        **REPORT,
        "proven": False,
        "difference": {"value": 0.0, "interval": [-0.1, 0.1], "p_value": 0.51234},
        "changed": {"better": 1204, "worse": 1187, "same": 12},
    }
    image = draw([], report)
    assert inked(image, picture.DIM, (830, 635, 1170, 660), 60)  # a third line
    assert not inked(image, picture.DIM, (830, 660, 1170, 672), 60)
    assert not inked(image, picture.DIM, (1168, 540, 1199, 672), 60)


@pytest.mark.parametrize("report", [{}, {"start": None, "tuned": None}, {"dev_score": 0.5, "best_step": 3}])
def test_without_a_test_a_sentence_stands_there(report: dict[str, Any]) -> None:
    image = draw(rows([0.1, 0.2]), report)
    assert len(inked(image, picture.TRACK, RIGHT)) < 300 < 5000 < len(inked(draw([]), picture.TRACK, RIGHT))
    assert len(inked(image, picture.DIM, (836, 168, 1166, 245), 60)) > 300
    assert bool(inked(image, picture.TUNED_DARK, RIGHT)) == ("dev_score" in report)


# --------------------------------------------------------------------------------------------- text


def test_a_long_name_is_cut_at_the_edge() -> None:
    long = draw_picture([], {"model": "m" * 300}, title="x" * 300)
    assert draw_picture([], {"model": "m" * 500}, title="x" * 500) == long
    assert draw_picture([], {"model": "m" * 300}, title="x" * 20) != long
    image = draw([], {"model": "m" * 300, "steps": 3, "seconds": 5.0, "peak_memory_bytes": 2**30}, "x" * 300)
    xs = [x for x, _ in inked(image, picture.INK, TITLE_BAND, 60)]
    assert 1100 < max(xs) <= WIDTH - 34
    facts = [x for x, _ in inked(image, picture.DIM, (0, 74, WIDTH, 100), 60)]
    assert 760 < max(facts) <= WIDTH - 34  # after the cut model come steps, time and memory


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        ("Запуск 你好", "?????? ??"),
        ("café na\u00efve e\u0301", "cafe naive e"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\u202eb", "a\\u202eb"),
        (" two\n\tlines ", "two lines"),
        ("\u00bd\u200b\U0001f600", "???"),
    ],
)
def test_what_the_font_lacks_is_replaced(title: str, shown: str) -> None:
    assert draw_picture([], {}, title=title) == draw_picture([], {}, title=shown)


def test_the_heading_says_how_far_a_run_came() -> None:
    facts = (0, 74, WIDTH, 100)
    whole = draw(rows([0.1, 0.2]), {"steps": 2, "seconds": 3.0})
    part = draw(rows([0.1, 0.2]), {"steps": 9, "seconds": 3.0})
    assert not same(whole, part, facts)
    assert same(whole, draw(rows([0.1, 0.2]), {"seconds": 3.0}), facts)


def test_without_freetype_the_small_font_is_enlarged(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = draw([])
    monkeypatch.setattr(ImageFont, "core", DeferredError(ImportError("no FreeType")))
    image = draw([], title="quickstart … é")
    assert len(inked(image, picture.INK, TITLE_BAND, 60)) > 300 and not same(image, usual, TITLE_BAND)
    assert draw([], title="quickstart ? e").tobytes() == image.tobytes()
    assert max(x for x, _ in inked(draw([], title="x" * 300), picture.INK, TITLE_BAND, 60)) <= WIDTH - 34


# --------------------------------------------------------------------------------------------- anything

NUMBERS = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-3, 3))
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["step", "reward/mean", "eval/score", "groups/zero_variance"]), NUMBERS), max_size=4
)


@settings(max_examples=12, deadline=None)
@given(ROWS, st.dictionaries(st.sampled_from(["steps", "best_step", "seconds", "dev_score", "n"]), NUMBERS), st.text())
@example([{"reward/mean": 1e99}, {"reward/mean": -1e99}], {}, "")
@example([{"reward/mean": 5e-324}, {"reward/mean": 0.0}], {"best_step": 1}, "")
@example([{"reward/mean": 1.0}, {"reward/mean": 1.0 + 1e-15}], {}, "")
@example([{"step": 1}, {"step": 2e9, "reward/mean": 1.0}], {}, "")
def test_any_numbers_and_any_title_give_a_picture(metrics: Rows, report: dict[str, Any], title: str) -> None:
    image = draw(metrics, {**REPORT, **report, "stopped_early": True}, title)
    assert image.size == (WIDTH, HEIGHT)
