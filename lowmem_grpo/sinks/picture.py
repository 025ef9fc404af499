"""A run as one picture: what it earned step by step, and what it was worth on problems it never saw.

`PictureSink` draws it when the report is there. `draw_picture` turns the rows of metrics.jsonl and the content of
report.json into the bytes of a PNG and touches no disk. `lay_out` says where everything goes, so that a test can look
at the right pixel.

Pillow is imported when a picture is drawn and not before. Its own font knows ASCII and little more: an accented letter
loses its accent, any other character becomes "?".
"""

from __future__ import annotations

import io
import math
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lowmem_grpo.sinks import Sink
from lowmem_grpo.sinks.render import clean_text, duration, size, verdict

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

    from lowmem_grpo.rundir import RunDir

__all__ = [
    "HEIGHT",
    "ROW_PX",
    "WIDTH",
    "Layout",
    "Measure",
    "PictureSink",
    "Scale",
    "Side",
    "draw_picture",
    "lay_out",
    "nice_ticks",
    "running_mean",
    "smoothing_window",
]

WIDTH, HEIGHT = 1200, 675
"""Pixels of the picture; every other length in this module is in these pixels too."""

ROW_PX = 29
"""From the bar of the start down to the bar of the tuned model."""

INK, DIM, LINE, TRACK, PAPER = "#1c2530", "#5b6673", "#dde2e8", "#edf0f4", "#fdfdfe"
REWARD, REWARD_PALE = "#1f5fd0", "#b3cbf5"
TUNED, TUNED_DARK = "#1d9a7d", "#0a4f3f"
START, START_DARK = "#b1bac5", "#56606c"
DEAD, DEAD_DARK = "#f6d9a4", "#8f5c00"
GOOD, WARN, BAD = "#13794a", "#8f5c00", "#b3261e"

_OVERSAMPLE = 2
_CURVE_LEFT, _CURVE_RIGHT = 92, 742
_REWARD_TOP, _REWARD_BOTTOM = 166, 382
_LOWER_TOP, _LOWER_BOTTOM = 456, 588
_RESULT_LEFT, _RESULT_RIGHT = 836, 1166
_TRACK_LEFT, _TRACK_RIGHT = 898, 1086
_FIRST_MEASURE = 230
_MARGIN = 34
_COLUMN_PX = 2


# --------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight map from the values `low` to `high` to the pixels `start` to `end`.

    >>> Scale(0.0, 2.0, 100.0, 200.0).px(1.5)
    175.0
    """

    low: float
    high: float
    start: float
    end: float

    def px(self, value: float) -> float:
        """The pixel of `value`."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def nice_ticks(low: float, high: float, wanted: int = 5, *, whole: bool = False) -> list[tuple[float, str]]:
    """About `wanted` round values between `low` and `high` with their texts; `whole` allows whole numbers only.

    >>> nice_ticks(-0.1, 1.1, 4)
    [(0.0, '0.0'), (0.5, '0.5'), (1.0, '1.0')]
    """
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    multiples = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    plain = max(abs(low), abs(high)) < 1e6 and decimals <= 4
    return [(n * step, f"{n * step:.{decimals}f}" if plain else f"{n * step:.3g}") for n in multiples]


def smoothing_window(n: int) -> int:
    """How many of `n` points the smoothed line averages: a tenth of them, odd, so that it has a middle.

    >>> smoothing_window(4), smoothing_window(60), smoothing_window(5000)
    (1, 7, 501)
    """
    return n // 10 | 1


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the `window` (odd) values around each one; near the ends, of those that are there.

    >>> running_mean([0.0, 3.0, 6.0], 3)
    [1.5, 3.0, 4.5]
    """
    if not values:
        return []
    half, base = window // 2, values[0]  # sums of differences to the first: equal values stay exactly equal
    sums = [0.0, *accumulate(value - base for value in values)]
    spans = ((max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values)))
    return [base + (sums[end] - sums[begin]) / (end - begin) for begin, end in spans]


def _known(value: Any) -> float | None:
    """`value` where it is a number that can be drawn."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e100 else None


Points = list[tuple[int, float]]
"""(step, value), by step."""


def _series(metrics: Sequence[Mapping[str, float]], name: str) -> Points:
    """The steps at which `name` was measured. A row without a step counts by its place."""
    values = ((_step(row, place), _known(row.get(name))) for place, row in enumerate(metrics, 1))
    return sorted((step, value) for step, value in values if value is not None)


def _step(row: Mapping[str, float], place: int) -> int:
    step = _known(row.get("step"))
    return place if step is None or abs(step) > 1e12 else int(step)


@dataclass(frozen=True, slots=True)
class _Column:
    """What is drawn at one place of the x axis: the points that fall there."""

    x: float
    low: float
    mean: float
    high: float


def _columns(points: Points, x: Scale) -> list[_Column]:
    """`points` thinned to columns of `_COLUMN_PX` pixels; up to that density, one column a point."""
    columns = []
    for _, members in groupby(points, key=lambda point: math.floor(x.px(point[0]) / _COLUMN_PX)):
        steps, values = zip(*members, strict=True)
        mean = values[0] + math.fsum(value - values[0] for value in values) / len(values)
        columns.append(_Column(x.px(sum(steps) / len(steps)), min(values), mean, max(values)))
    return columns


# --------------------------------------------------------------------------------------------- where things go


@dataclass(frozen=True, slots=True)
class Side:
    """One measure of the start or of the tuned model, with its 95 % interval where the report has one."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Measure:
    """Start against tuned in one measure. `y` is the middle of the start's bar, `ROW_PX` above that of the tuned."""

    label: str
    start: Side | None
    tuned: Side | None
    gain: Side | None
    scale: Scale
    y: float


@dataclass(frozen=True, slots=True)
class Layout:
    """The scales of the curves (x: `steps`; y of the reward, the dev score, the dead groups) and the measures."""

    steps: Scale
    reward: Scale
    dev: Scale
    dead: Scale
    measures: tuple[Measure, ...]


def lay_out(metrics: Sequence[Mapping[str, float]], report: Mapping[str, Any]) -> Layout:
    """Where `draw_picture` puts the values of `metrics` and `report`.

    >>> layout = lay_out([{"step": 1, "reward/mean": 0.0}, {"step": 3, "reward/mean": 1.0}], {})
    >>> layout.steps.px(2)
    417.0
    """
    rewards, scores = _series(metrics, "reward/mean"), _series(metrics, "eval/score")
    steps = [step for step, _ in rewards + scores + _series(metrics, "groups/zero_variance")]
    dead = _share_scale(_LOWER_BOTTOM, _LOWER_TOP)
    shares = all(0 <= score <= 1 for _, score in scores)
    return Layout(
        Scale(min(steps, default=1) - 0.5, max(steps, default=1) + 0.5, _CURVE_LEFT, _CURVE_RIGHT),
        _scale_around([reward for _, reward in rewards], _REWARD_BOTTOM, _REWARD_TOP),
        dead if shares else _scale_around([score for _, score in scores], _LOWER_BOTTOM, _LOWER_TOP),
        dead,
        _measures(report),
    )


def _share_scale(start: float, end: float) -> Scale:
    return Scale(-0.04, 1.04, start, end)


def _scale_around(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale with a little room around `values`; values that are all equal lie in its middle."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    largest = max(abs(low), abs(high))
    if largest < 1e-12:
        room = 0.5
    elif high - low <= 1e-9 * largest:
        room = largest / 2
    else:
        room = (high - low) * 0.06
    return Scale(low - room, high + room, start, end)


def _measures(report: Mapping[str, Any]) -> tuple[Measure, ...]:
    sides = (report.get("start") or {}, report.get("tuned") or {})
    measures: list[Measure] = []
    y = float(_FIRST_MEASURE)
    for label, interval_key, difference_key in (
        ("score", "interval", "difference"),
        ("correct", "correct_interval", "correct_difference"),
        ("format", "format_interval", "format_difference"),
    ):
        start, tuned = (_side(side, label, interval_key) for side in sides)
        if start is None and tuned is None:
            continue
        gain = _side(report.get(difference_key) or {}, "value", "interval")
        if gain is None and start is not None and tuned is not None:
            gain = Side(tuned.value - start.value, None)
        scale = _bar_scale([side for side in (start, tuned) if side is not None])
        if measures and measures[-1].scale != scale:
            y += 22  # room for the numbers of the scale above
        measures.append(Measure(label, start, tuned, gain, scale, y))
        y += 2 * ROW_PX + 44
    return tuple(measures)


def _side(values: Mapping[str, Any], key: str, interval_key: str) -> Side | None:
    value = _known(values.get(key))
    if value is None:
        return None
    bounds = [_known(bound) for bound in values.get(interval_key) or ()]
    low, high = bounds if len(bounds) == 2 else (None, None)
    return Side(value, None if low is None or high is None else (low, high))


def _bar_scale(sides: Sequence[Side]) -> Scale:
    """From 0 to 1, or, where a value lies outside, as far as the values go; 0 is always on it."""
    values = [0.0, *(value for side in sides for value in (side.value, *(side.interval or ())))]
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    return Scale(low, high, _TRACK_LEFT, _TRACK_RIGHT)


# --------------------------------------------------------------------------------------------- ink


Anchor = Literal["l", "m", "r"]
"""Whether a text's x is its left end, its middle or its right end; its y is always its middle."""


class _Typeface(Protocol):
    """A font in every size. Sizes and lengths are in pixels of the drawing."""

    def knows(self, character: str) -> bool: ...
    def width(self, text: str, size_px: float) -> float: ...
    def write(
        self, draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, size_px: float, colour: str,
        anchor: Anchor, bold: bool,
    ) -> None: ...  # fmt: skip


class _Outlines:
    """Pillow's own scalable font. It has one weight: bold is the same font with a thicker pen."""

    def __init__(self) -> None:
        self._sizes: dict[float, ImageFont.FreeTypeFont] = {}
        self._missing = bytes(self._font(24.0).getmask("\uffff"))  # not a character, so no font has it

    def _font(self, size_px: float) -> ImageFont.FreeTypeFont:
        from PIL import ImageFont

        if size_px not in self._sizes:
            font = ImageFont.load_default(size=size_px)
            assert isinstance(font, ImageFont.FreeTypeFont)
            self._sizes[size_px] = font
        return self._sizes[size_px]

    def knows(self, character: str) -> bool:
        return bytes(self._font(24.0).getmask(character)) != self._missing

    def width(self, text: str, size_px: float) -> float:
        return self._font(size_px).getlength(text)

    def write(
        self, draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, size_px: float, colour: str,
        anchor: Anchor, bold: bool,
    ) -> None:  # fmt: skip
        draw.text(at, text, colour, self._font(size_px), anchor=f"{anchor}m", stroke_width=int(bold))


class _Bitmaps:
    """Pillow's small fixed font, enlarged: for a Pillow that was built without FreeType."""

    def __init__(self) -> None:
        from PIL import ImageFont

        self._font = ImageFont.load_default_imagefont()

    def knows(self, character: str) -> bool:
        return character.isascii() and character.isprintable()

    def _zoom(self, size_px: float) -> float:
        return size_px / 11

    def width(self, text: str, size_px: float) -> float:
        return self._font.getlength(text) * self._zoom(size_px)

    def write(
        self, draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, size_px: float, colour: str,
        anchor: Anchor, bold: bool,
    ) -> None:  # fmt: skip
        from PIL import Image, ImageDraw

        if not text:
            return
        _, _, width, height = self._font.getbbox(text)
        stencil = Image.new("L", (int(width), int(height)))
        ImageDraw.Draw(stencil).text((0, 0), text, 255, self._font)
        zoom = self._zoom(size_px)
        stencil = stencil.resize((round(width * zoom), round(height * zoom)))
        left = at[0] - stencil.width * {"l": 0.0, "m": 0.5, "r": 1.0}[anchor]
        draw.bitmap((round(left), round(at[1] - stencil.height / 2)), stencil, colour)


def _typeface() -> _Typeface:
    try:
        return _Outlines()
    except ImportError:  # what Pillow raises without FreeType
        return _Bitmaps()


class _Canvas:
    """Draws in the pixels of the picture, on a sheet that is larger, so that edges come out smooth."""

    def __init__(self) -> None:
        from PIL import Image, ImageDraw

        self._sheet = Image.new("RGB", (WIDTH * _OVERSAMPLE, HEIGHT * _OVERSAMPLE), PAPER)
        self._draw = ImageDraw.Draw(self._sheet)
        self._typeface = _typeface()

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float) -> None:
        """A line through `points` with round ends."""
        pen = round(width * _OVERSAMPLE)
        self._draw.line([(x * _OVERSAMPLE, y * _OVERSAMPLE) for x, y in points], colour, pen, joint="curve")
        if pen > 2:
            for x, y in (points[0], points[-1]):
                self.dot(x, y, width / 2, colour)

    def dashes(self, x: float, top: float, bottom: float, colour: str) -> None:
        """A dashed line from `top` down to `bottom`."""
        for y in range(round(top), round(bottom), 9):
            self.line([(x, y), (x, min(y + 5, bottom))], colour, 1.5)

    def box(self, left: float, top: float, right: float, bottom: float, colour: str, radius: float = 0) -> None:
        """A filled box, at least a pixel of the sheet wide and high."""
        x0, y0, x1, y1 = (round(edge * _OVERSAMPLE) for edge in (left, top, right, bottom))
        corners = (x0, y0, max(x0, x1 - 1), max(y0, y1 - 1))
        self._draw.rounded_rectangle(corners, min(radius * _OVERSAMPLE, (x1 - x0) / 2), colour)

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """A filled circle."""
        self._draw.circle((x * _OVERSAMPLE, y * _OVERSAMPLE), radius * _OVERSAMPLE, colour)

    def shown(self, text: str) -> str:
        """`text` on one line, in characters that the font has."""
        line = unicodedata.normalize("NFC", " ".join(clean_text(text).split()))
        return "".join(self._character(c) for c in line)

    def _character(self, character: str) -> str:
        base = unicodedata.normalize("NFD", character)[0]
        return next((c for c in (character, base) if self._typeface.knows(c)), "?")

    def width(self, text: str, size_px: float) -> float:
        """How wide `text` comes out."""
        return self._typeface.width(text, size_px * _OVERSAMPLE) / _OVERSAMPLE

    def cut(self, text: str, size_px: float, limit_px: float) -> str:
        """As much of the start of `text` as fits, with an ellipsis when that is not all."""
        text = self.shown(text)
        if self.width(text, size_px) <= limit_px:
            return text
        ellipsis = "…" if self._typeface.knows("…") else "..."
        fitting = bisect_right(range(len(text)), limit_px, key=lambda n: self.width(text[:n] + ellipsis, size_px))
        return text[: max(0, fitting - 1)].rstrip() + ellipsis

    def text(
        self, x: float, y: float, text: str, size_px: float, colour: str = INK, anchor: Anchor = "l", *,
        bold: bool = False, limit_px: float = WIDTH,
    ) -> float:  # fmt: skip
        """Write `text` and return its width. Wider than `limit_px`, it shrinks by up to a quarter and then is cut."""
        text, smallest = self.shown(text), size_px * 0.75
        while self.width(text, size_px) > limit_px and size_px > smallest:
            size_px = max(smallest, size_px - 0.5)
        text = self.cut(text, size_px, limit_px)
        at = (x * _OVERSAMPLE, y * _OVERSAMPLE)
        self._typeface.write(self._draw, at, text, size_px * _OVERSAMPLE, colour, anchor, bold)
        return self.width(text, size_px)

    def paragraph(self, x: float, y: float, text: str, size_px: float, colour: str, limit_px: float) -> float:
        """Write `text` in lines of at most `limit_px`, the first one at `y`; returns the y of the next line."""
        lines: list[str] = []
        for word in text.split():
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and self.width(longer, size_px) <= limit_px:
                lines[-1] = longer
            else:
                lines.append(word)
        for line in lines:
            self.text(x, y, line, size_px, colour, limit_px=limit_px)
            y += size_px * 1.3
        return y

    def png(self) -> bytes:
        """The picture: rounded corners and a thin edge, so that it sits on a dark page as on a light one."""
        from PIL import Image, ImageDraw

        edges, radius = (0, 0, self._sheet.width - 1, self._sheet.height - 1), 14 * _OVERSAMPLE
        self._draw.rounded_rectangle(edges, radius, outline=LINE, width=_OVERSAMPLE)
        mask = Image.new("L", self._sheet.size)
        ImageDraw.Draw(mask).rounded_rectangle(edges, radius, 255)
        self._sheet.putalpha(mask)
        data = io.BytesIO()
        self._sheet.resize((WIDTH, HEIGHT), Image.Resampling.BOX).save(data, "PNG", optimize=True)
        return data.getvalue()


# --------------------------------------------------------------------------------------------- the parts


def draw_picture(metrics: Sequence[Mapping[str, float]], report: Mapping[str, Any], *, title: str) -> bytes:
    """The bytes of a PNG, `WIDTH` x `HEIGHT` pixels, of a run: its learning curve, and start against tuned.

    `metrics` are the rows of metrics.jsonl, `report` the content of report.json, `title` the name of the run. What is
    missing or not finite is left out, and the picture says so where a part of it would be empty. Equal arguments give
    equal bytes.
    """
    layout = lay_out(metrics, report)
    canvas = _Canvas()
    _draw_heading(canvas, metrics, report, title)
    _draw_rewards(canvas, layout, _series(metrics, "reward/mean"))
    _draw_lower(canvas, layout, _series(metrics, "eval/score"), _series(metrics, "groups/zero_variance"))
    if metrics:
        _draw_steps(canvas, layout.steps)
    if metrics and report.get("stopped_early"):
        _draw_best_step(canvas, layout.steps, report.get("best_step"))
    _draw_result(canvas, layout.measures, report)
    return canvas.png()


def _draw_heading(
    canvas: _Canvas, metrics: Sequence[Mapping[str, float]], report: Mapping[str, Any], title: str
) -> None:
    canvas.text(_MARGIN, 46, title, 32, bold=True, limit_px=WIDTH - 2 * _MARGIN)
    model = canvas.cut(str(report.get("model") or ""), 20, 560)
    peak = _known(report.get("peak_memory_bytes"))
    x: float = _MARGIN
    for fact in (model, _trained(metrics, report), f"peak memory {size(peak)}" if peak else ""):
        if fact and x > _MARGIN:
            canvas.line([(x + 14, 77), (x + 14, 95)], LINE, 1.5)
            x += 28
        x += canvas.text(x, 86, fact, 20, DIM, limit_px=WIDTH - _MARGIN - x)
    canvas.line([(_MARGIN, 112), (WIDTH - _MARGIN, 112)], LINE, 1)


def _trained(metrics: Sequence[Mapping[str, float]], report: Mapping[str, Any]) -> str:
    """`60 steps in 13:20 min`, or `40 of 60 steps`."""
    steps, seconds = _known(report.get("steps")), _known(report.get("seconds"))
    last = max((_step(row, place) for place, row in enumerate(metrics, 1)), default=None)
    whole = last if steps is None else int(steps)
    if whole is None:
        return ""
    count = f"{last} of {whole}" if last is not None and last < whole else f"{whole}"
    words = f"{count} step{'' if whole == 1 else 's'}"
    return words if seconds is None else f"{words} in {duration(seconds)}"


def _draw_grid(canvas: _Canvas, y: Scale, ticks: Sequence[tuple[float, str]], colour: str) -> None:
    for value, text in ticks:
        canvas.line([(_CURVE_LEFT, y.px(value)), (_CURVE_RIGHT, y.px(value))], LINE, 1)
        canvas.text(_CURVE_LEFT - 10, y.px(value), text, 19, colour, "r", limit_px=_CURVE_LEFT - 20)


def _draw_rewards(canvas: _Canvas, layout: Layout, rewards: Points) -> None:
    canvas.text(_MARGIN, 138, "Reward", 23, bold=True)
    if not rewards:
        _draw_nothing(canvas, _REWARD_TOP, _REWARD_BOTTOM, "No reward was measured.")
        return
    y, window = layout.reward, smoothing_window(len(rewards))
    _draw_grid(canvas, y, nice_ticks(y.low, y.high), DIM)
    columns = _columns(rewards, layout.steps)
    crowded = len(rewards) > (_CURVE_RIGHT - _CURVE_LEFT) / _COLUMN_PX
    for column in columns:
        if crowded:
            left, middle = column.x - _COLUMN_PX / 2, (y.px(column.low) + y.px(column.high)) / 2
            half = max(1.0, (y.px(column.low) - y.px(column.high)) / 2)
            canvas.box(left, middle - half, left + _COLUMN_PX, middle + half, REWARD_PALE)
        else:
            canvas.dot(column.x, y.px(column.mean), 4 if len(rewards) <= 120 else 2.5, REWARD_PALE)
    steps, values = zip(*rewards, strict=True)
    smooth = _columns(list(zip(steps, running_mean(values, window), strict=True)), layout.steps)
    canvas.line([(column.x, y.px(column.mean)) for column in smooth], REWARD, 3.5)
    if len(rewards) == 1:
        canvas.dot(columns[0].x, y.px(rewards[0][1]), 6, REWARD)
    _draw_reward_legend(canvas, window)


def _draw_reward_legend(canvas: _Canvas, window: int) -> None:
    x: float = _CURVE_RIGHT
    if window > 1:
        x -= canvas.text(x, 139, f"mean of {window} steps", 19, DIM, "r") + 8
        canvas.line([(x - 26, 139), (x, 139)], REWARD, 3.5)
        x -= 50
    x -= canvas.text(x, 139, "each step", 19, DIM, "r") + 12
    canvas.dot(x, 139, 5, REWARD_PALE if window > 1 else REWARD)


def _draw_lower(canvas: _Canvas, layout: Layout, scores: Points, dead: Points) -> None:
    """The dev score as marked points over the share of dead groups as bars; either may be missing."""
    if not scores and not dead:
        canvas.text(_MARGIN, 428, "Dev score and dead groups", 23, bold=True)
        _draw_nothing(canvas, _LOWER_TOP, _LOWER_BOTTOM, "No dev score and no groups were measured.")
        return
    percent = [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")]
    if dead:
        _draw_dead_groups(canvas, layout, dead)
    if not scores:
        canvas.text(_MARGIN, 428, "Dead groups", 23, bold=True)
        canvas.text(_CURVE_RIGHT, 429, "all answers scored the same", 19, DIM, "r")
        _draw_grid(canvas, layout.dead, percent, DEAD_DARK)
        return
    y = layout.dev
    ticks = [(0.0, "0.0"), (0.5, "0.5"), (1.0, "1.0")] if y == layout.dead else nice_ticks(y.low, y.high, 3)
    _draw_grid(canvas, y, ticks, TUNED_DARK)
    if dead:
        for value, text in percent:
            canvas.text(_CURVE_RIGHT + 8, layout.dead.px(value), text, 19, DEAD_DARK)
    at = [(column.x, y.px(column.mean)) for column in _columns(scores, layout.steps)]
    canvas.line(at, TUNED, 2.5)
    for point in at:
        canvas.dot(*point, 7, PAPER)
        canvas.dot(*point, 5.5, TUNED)
    _draw_lower_legend(canvas, bool(dead))


def _draw_lower_legend(canvas: _Canvas, has_dead: bool) -> None:
    x = _MARGIN + canvas.text(_MARGIN, 428, "Dev score", 23, bold=True) + 18
    canvas.line([(x - 2, 429), (x + 22, 429)], TUNED, 2.5)
    canvas.dot(x + 10, 429, 5.5, TUNED)
    if has_dead:
        words = "dead groups: all answers scored the same"
        left = _CURVE_RIGHT - canvas.text(_CURVE_RIGHT, 429, words, 19, DIM, "r")
        canvas.box(left - 24, 421, left - 8, 437, DEAD)


def _draw_dead_groups(canvas: _Canvas, layout: Layout, dead: Points) -> None:
    a_step = layout.steps.px(1) - layout.steps.px(0)
    half = max(_COLUMN_PX / 2, min(24.0, a_step) * 0.42)
    for column in _columns(dead, layout.steps):
        share = min(1.0, max(0.0, column.mean))
        left, right = column.x - half, column.x + half
        if share > 0:
            canvas.box(left, layout.dead.px(share), right, layout.dead.px(0), DEAD)


def _draw_nothing(canvas: _Canvas, top: float, bottom: float, sentence: str) -> None:
    canvas.box(_CURVE_LEFT, top, _CURVE_RIGHT, bottom, TRACK, 8)
    canvas.text((_CURVE_LEFT + _CURVE_RIGHT) / 2, (top + bottom) / 2, sentence, 20, DIM, "m")


def _draw_steps(canvas: _Canvas, x: Scale) -> None:
    for step, text in nice_ticks(x.low, x.high, 6, whole=True):
        canvas.line([(x.px(step), _LOWER_BOTTOM), (x.px(step), _LOWER_BOTTOM + 6)], DIM, 1)
        canvas.text(x.px(step), _LOWER_BOTTOM + 19, text, 19, DIM, "m")
    canvas.text((_CURVE_LEFT + _CURVE_RIGHT) / 2, _LOWER_BOTTOM + 46, "step", 19, DIM, "m")


def _draw_best_step(canvas: _Canvas, steps: Scale, best: Any) -> None:
    """A line through both panels at the step whose adapter was kept, when training ended before its last step."""
    step = _known(best)
    if step is None or not steps.low <= step <= steps.high:
        return
    x = steps.px(step)
    canvas.dashes(x, _REWARD_TOP - 8, _REWARD_BOTTOM + 6, INK)
    canvas.dashes(x, _LOWER_TOP - 8, _LOWER_BOTTOM, INK)
    words = f"stopped early, best step {step:.0f}"
    half = canvas.width(words, 19) / 2
    middle = min(max(x, _CURVE_LEFT + half), _CURVE_RIGHT - half)
    canvas.text(middle, (_REWARD_BOTTOM + _LOWER_TOP) / 2 - 21, words, 19, INK, "m")


# --------------------------------------------------------------------------------------------- the result


def _figure(value: float, *, signed: bool = False) -> str:
    """A score in few characters."""
    digits = ".3f" if abs(value) < 100 else ".1f" if abs(value) < 1e5 else ".2e"
    return f"{value:{'+' if signed else ''}{digits}}"


def _gain(gain: Side) -> str:
    text = _figure(gain.value, signed=True)
    if gain.interval is None:
        return text
    low, high = (_figure(bound, signed=True) for bound in gain.interval)
    return f"{text} [{low}, {high}]"


def _draw_result(canvas: _Canvas, measures: Sequence[Measure], report: Mapping[str, Any]) -> None:
    wide = _RESULT_RIGHT - _RESULT_LEFT
    canvas.line([(812, 130), (812, HEIGHT - 28)], LINE, 1)
    canvas.text(_RESULT_LEFT, 138, "Start against tuned", 23, bold=True)
    if not measures:
        _draw_no_test(canvas, report)
        return
    n = _known(report.get("n"))
    problems = f"on {n:.0f} unseen problems" if n is not None else "on unseen problems"
    canvas.text(_RESULT_LEFT, 166, f"{problems}, 95 % intervals", 19, DIM, limit_px=wide)
    for measure, below in zip(measures, [*measures[1:], None], strict=True):
        _draw_measure(canvas, measure)
        if below is None or below.scale != measure.scale:
            _draw_bar_scale(canvas, measure)
    if "proven" in report and report.get("difference"):
        _draw_verdict(canvas, report)


def _draw_no_test(canvas: _Canvas, report: Mapping[str, Any]) -> None:
    sentence = "There were no test problems to compare start and tuned on (data.test_size)."
    y = canvas.paragraph(_RESULT_LEFT, 178, sentence, 20, DIM, _RESULT_RIGHT - _RESULT_LEFT)
    score, step = _known(report.get("dev_score")), _known(report.get("best_step"))
    if score is not None:
        at = "" if step is None else f" at step {step:.0f}"
        canvas.text(_RESULT_LEFT, y + 22, _figure(score), 32, TUNED_DARK, bold=True)
        canvas.text(_RESULT_LEFT, y + 56, f"best dev score{at}", 20, DIM)


def _draw_measure(canvas: _Canvas, measure: Measure) -> None:
    named = canvas.text(_RESULT_LEFT, measure.y - 30, measure.label, 20, bold=True)
    if measure.gain is not None:
        value = measure.gain.value
        colour = GOOD if value > 0 else BAD if value < 0 else DIM
        room = _RESULT_RIGHT - _RESULT_LEFT - named - 12
        canvas.text(_RESULT_RIGHT, measure.y - 30, _gain(measure.gain), 20, colour, "r", limit_px=room)
    tuned_y = measure.y + ROW_PX
    _draw_side(canvas, "start", measure.start, measure.scale, measure.y, START, START_DARK)
    _draw_side(canvas, "tuned", measure.tuned, measure.scale, tuned_y, TUNED, TUNED_DARK)


def _draw_side(canvas: _Canvas, name: str, side: Side | None, scale: Scale, y: float, colour: str, dark: str) -> None:
    canvas.text(_RESULT_LEFT, y, name, 19, DIM)
    canvas.box(scale.start, y - 9, scale.end, y + 9, TRACK, 3)
    if side is None:
        canvas.text(_RESULT_RIGHT, y, "none", 19, DIM, "r")
        return
    left, right = sorted((scale.px(0), scale.px(side.value)))
    if right > left:
        canvas.box(left, y - 9, right, y + 9, colour, 3)
    if side.interval is not None:
        low, high = (scale.px(bound) for bound in side.interval)
        canvas.box(low, y - 1, high, y + 1, dark)
        for end in (low, high):
            canvas.box(end - 1, y - 6, end + 1, y + 6, dark)
    canvas.text(_RESULT_RIGHT, y, _figure(side.value), 20, INK, "r", limit_px=_RESULT_RIGHT - _TRACK_RIGHT - 8)


def _draw_bar_scale(canvas: _Canvas, measure: Measure) -> None:
    scale, y = measure.scale, measure.y + ROW_PX + 22
    ends: tuple[tuple[float, Anchor], ...] = ((scale.low, "l"), (scale.high, "r"))
    for value, anchor in ends:
        canvas.text(scale.px(value), y, f"{value:.4g}", 17, DIM, anchor)


def _draw_verdict(canvas: _Canvas, report: Mapping[str, Any]) -> None:
    word, _, sentence = verdict(report).partition(": ")
    wide = _RESULT_RIGHT - _RESULT_LEFT
    canvas.line([(_RESULT_LEFT, 545), (_RESULT_RIGHT, 545)], LINE, 1)
    taken = canvas.text(_RESULT_LEFT, 571, word, 28, GOOD if report["proven"] else WARN, bold=True)
    changed = report.get("changed") or {}
    if {"better", "worse"} <= changed.keys():
        words = f"{changed['better']} better, {changed['worse']} worse"
        canvas.text(_RESULT_RIGHT, 572, words, 19, DIM, "r", limit_px=wide - taken - 16)
    canvas.paragraph(_RESULT_LEFT, 600, sentence[:1].upper() + sentence[1:], 18, DIM, wide)


# --------------------------------------------------------------------------------------------- the sink


class PictureSink(Sink):
    """Draws `report.png` into the run folder at the end of a run, from the files there."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def report(self, report: Mapping[str, Any]) -> None:
        picture = draw_picture(list(self._run_dir.read("metrics")), report, title=self._run_dir.path.name)
        self._run_dir.replace_file(self._run_dir.picture_path, picture)
