"""How things look in a terminal: pure functions from reports to text and to rich renderables.

Answers and prompts come from a model and a data set, so they are never read as markup, and their control characters
are shown as escapes instead of being obeyed.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lowmem_grpo.types import Finding

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowmem_grpo.types import Prompt, ScoredGroup

__all__ = [
    "LOSS_LEGEND",
    "LOSS_NOTE",
    "clean_text",
    "cut_text",
    "duration",
    "measures",
    "plain_card",
    "plain_gate",
    "plain_sample",
    "plain_step",
    "prompt_line",
    "render_card",
    "render_gate",
    "render_sample",
    "size",
    "sparkline",
    "verdict",
]

LOSS_NOTE = (
    "A loss near 0 is normal: the advantages of a group sum to 0, so the value cancels while the gradient does not. "
    "Watch the reward."
)

LOSS_LEGEND = "Loss near 0 is normal: it cancels within a group, its gradient does not. Watch the reward."

_BARS = "▁▂▃▄▅▆▇█"
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_REASONS = {"end": "end", "stop": "stop string", "length": "cut off"}


# --------------------------------------------------------------------------------------------- small pieces


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last `width` values as bars from their minimum to their maximum; NaN is a space, one level is a low line.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    shown = list(values)[-width:]
    known = [value for value in shown if value == value]
    if not known:
        return " " * len(shown)
    low, span = min(known), max(known) - min(known)
    return "".join(" " if v != v else _BARS[round((v - low) / span * 7 + 1e-9) if span > 0 else 0] for v in shown)


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(42), duration(125), duration(7500)
    ('42 s', '2:05 min', '2:05 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def size(n_bytes: float) -> str:
    """Bytes for people, in powers of 1024.

    >>> size(1536 * 1024**2)
    '1.50 GiB'
    """
    return f"{n_bytes / 2**30:.2f} GiB"


def clean_text(text: str) -> str:
    """`text` with every control character but newline and tab as a visible escape.

    >>> clean_text("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if _harmless(c) else ascii(c)[1:-1] for c in text.replace("\r\n", "\n"))


def _harmless(character: str) -> bool:
    if character in "\n\t":
        return True
    return unicodedata.category(character) not in ("Cc", "Cs") and character not in _BIDI


def cut_text(text: str, limit: int) -> str:
    """`text` in at most about `limit` characters: the start, how much is left out, and the end (the answer's home).

    >>> cut_text("a" * 50 + "b" * 50, 20)
    'aaaaaaaaaaaaa […80 characters…] bbbbbbb'
    """
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]} […{len(text) - limit} characters…] {text[len(text) - (limit - head) :]}"


def prompt_line(prompt: Prompt) -> str:
    """What the user asks in `prompt`: the text, or the content of the last user message (else the last message)."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message.get("role") == "user"] or list(prompt)
    content = asked[-1].get("content", "") if asked else ""
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content)


def _number(value: float, digits: int = 3) -> str:
    """A loss or a norm: fixed point, or powers of ten where fixed point would show only zeros."""
    return f"{value:.{digits}f}" if value == 0 or 0.001 <= abs(value) < 1e5 else f"{value:.1e}"


# --------------------------------------------------------------------------------------------- measures of a step


def measures(metrics: Mapping[str, float], *, max_new_tokens: int = 0) -> dict[str, str]:
    """The metrics of a step as labelled values in reading order; what was not measured is not there.

    >>> measures({"reward/mean": 0.5, "groups/zero_variance": 0.25})
    {'reward': '0.500', 'dead groups': '25 %'}
    """
    known = {name: value for name, value in metrics.items() if value is not None and value == value}
    limit = f" of {max_new_tokens}" if max_new_tokens else ""
    simple: list[tuple[str, str, Any]] = [
        ("reward", "reward/mean", lambda v: f"{v:.3f}"),
        ("spread", "reward/within_group_std", lambda v: f"{v:.3f}"),
        ("dead groups", "groups/zero_variance", _percent),
        ("length", "completion/length_mean", lambda v: f"{v:.1f}{limit}"),
        ("truncated", "completion/truncated", _percent),
        ("unique", "completion/unique", _percent),
        ("entropy", "policy/entropy", _number),
        ("kl", "policy/kl", _number),
        ("loss", "optim/loss", _number),
        ("grad norm", "optim/grad_norm", _number),
        ("lr", "optim/lr", lambda v: f"{v:.1e}"),
        ("speed", "speed/rollout_tokens_per_s", lambda v: f"{v:.0f} tok/s"),
        ("step time", "time/step_s", duration),
    ]
    shown = {label: form(known[name]) for label, name, form in simple if name in known}
    shown.update(_memory(known))
    if "eval/score" in known:
        shown["dev score"] = f"{known['eval/score']:.3f}"
    return shown


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _memory(metrics: Mapping[str, float]) -> dict[str, str]:
    peaks = [metrics[k] for k in ("memory/rollout_peak_bytes", "memory/update_peak_bytes") if k in metrics]
    if not peaks:
        return {}
    planned = metrics.get("memory/planned_bytes")
    return {"memory": f"{max(peaks) / 2**30:.2f} of {size(planned)}" if planned else size(max(peaks))}


def plain_step(step: int, steps: int, metrics: Mapping[str, float], left_s: float | None, max_new_tokens: int) -> str:
    """One line for a log.

    >>> plain_step(3, 40, {"reward/mean": 0.5}, 90.0, 24)
    'step 3/40 | reward 0.500 | left 1:30 min'
    """
    parts = [f"{label} {value}" for label, value in measures(metrics, max_new_tokens=max_new_tokens).items()]
    left = [f"left {duration(left_s)}"] if left_s is not None else []
    return " | ".join([f"step {step}/{steps}", *parts, *left])


# --------------------------------------------------------------------------------------------- a sampled group


_Answer = tuple[str, str, float, str]
"""(reward, how it ended, advantage, text)"""


def _answers(group: ScoredGroup, advantages_G: Sequence[float], shown: int) -> list[tuple[_Answer, int]]:
    """Up to `shown` different answers, the highest advantage first, and how often each was given.

    When there are more, those in the middle are left out.
    """
    counts: Counter[_Answer] = Counter()
    for rollout, total, advantage in zip(group.group.rollouts, group.totals, advantages_G, strict=True):
        reward = "none" if total is None else f"{total:.2f}"
        counts[reward, _REASONS[rollout.stop_reason], advantage, rollout.text] += 1
    order = sorted(counts.items(), key=lambda item: -item[0][2])
    return order if len(order) <= shown else order[: shown - shown // 2] + order[len(order) - shown // 2 :]


def _heading(step: int, group: ScoredGroup, advantages_G: Sequence[float]) -> str:
    dead = ", all scored the same: nothing to learn here" if not any(advantages_G) else ""
    return f"{len(advantages_G)} answers to {clean_text(group.group.problem.id)}, step {step}{dead}"


def render_sample(step: int, group: ScoredGroup, advantages_G: Sequence[float], *, shown: int = 6) -> Panel:
    """A group with its answers, best first: reward, advantage (green raised, red lowered), how it ended."""
    table = Table(box=None, padding=(0, 1), expand=True, header_style="dim")
    for label in ("reward", "advantage"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("answer", ratio=1)
    for (reward, reason, advantage, text), count in _answers(group, advantages_G, shown):
        colour = "green" if advantage > 0 else "red" if advantage < 0 else "dim"
        answer = Text(_few_lines(cut_text(clean_text(text), 240)) or "(empty)", style="" if text else "dim")
        ended = Text(reason, style="yellow" if reason == _REASONS["length"] else "dim")
        table.add_row(reward, Text(f"{advantage:+.2f}", style=colour), ended, _times(count), answer)
    question = Text(_few_lines(cut_text(clean_text(prompt_line(group.group.problem.prompt)), 300)), style="bold")
    body = Table.grid(expand=True, padding=0)
    body.add_row(question)
    body.add_row(table)
    return Panel(body, title=Text(_heading(step, group, advantages_G)), title_align="left", border_style="cyan")


def _times(count: int) -> str:
    return f"x{count}" if count > 1 else ""


def _few_lines(text: str, limit: int = 6) -> str:
    """At most `limit` lines; the middle ones go first."""
    lines = text.strip("\n").split("\n")
    if len(lines) <= limit:
        return "\n".join(lines)
    return "\n".join([*lines[: limit - 3], f"[…{len(lines) - limit + 1} lines…]", *lines[-2:]])


def plain_sample(step: int, group: ScoredGroup, advantages_G: Sequence[float], *, shown: int = 6) -> list[str]:
    """The lines of `render_sample` for a log, one per answer."""
    question = cut_text(clean_text(prompt_line(group.group.problem.prompt)), 300).replace("\n", " / ")
    lines = [f"  {_heading(step, group, advantages_G)}", f"  prompt: {question}"]
    for (reward, reason, advantage, text), count in _answers(group, advantages_G, shown):
        answer = cut_text(clean_text(text), 240).replace("\n", " / ") or "(empty)"
        lines.append(
            f"  reward {reward}  advantage {advantage:+.2f}  {reason} {_times(count)}: {answer}".replace(" :", ":")
        )
    return lines


# --------------------------------------------------------------------------------------------- the gate


_VERDICTS = {
    "go": "Go: this can be learnt from.",
    "caution": "Go, with care: see what was found.",
    "stop": "No: as it is, nothing can be learnt.",
}


def _gate_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the content of gate.json says, a line each: (label, figures)."""
    rows = [("sampled", f"{report['prompts']} training prompts x {report['group_size']} answers of the start")]
    if report["reward_mean"] is not None:
        spread = f"{report['within_group_std']:.3f} inside a group, {report['reward_std']:.3f} over all"
        rows.append(("reward", f"mean {report['reward_mean']:.3f}, spread {spread}"))
    if report["pass_at"]:
        rows.append(("right", ", ".join(f"pass@{k} {share:.3f}" for k, share in report["pass_at"].items())))
    rows.append(("dead groups", f"{_percent(report['dead_share'])} of those sampled"))
    for forecast in report["forecasts"]:
        low, high = forecast["interval"]
        rows.append(
            (
                f"  at {forecast['group_size']} answers",
                f"{_percent(forecast['share'])} expected [{_percent(low)}, {_percent(high)}]",
            )
        )
    length = f"mean {report['length_mean']:.1f}, longest {report['length_max']} tokens"
    rows.append(("length", f"{length}, {_percent(report['truncated'])} cut at the limit"))
    rows.append(("unique", f"{_percent(report['unique'])} of the answers in a group are different"))
    if report["missing"] or report["failures"]:
        rows.append(("no reward", f"{_percent(report['missing'])} of the answers, {report['failures']} failures"))
    return rows


def _gate_findings(report: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """(what was found, [what to do, the best first]) by finding."""
    found = []
    for row in report["findings"]:
        finding = Finding.from_json(row)
        told = f"{finding.severity}: {finding.cause} ({finding.evidence})"
        found.append((clean_text(told), [clean_text(fix.sentence) for fix in finding.fixes]))
    return found


def render_gate(report: Mapping[str, Any]) -> RenderableType:
    """The content of gate.json as a card: figures, findings with what to do about them, verdict."""
    figures = Table.grid(padding=(0, 2))
    for label, text in _gate_rows(report):
        figures.add_row(Text(label, style="dim"), Text(text, overflow="fold"))
    body = Table.grid(expand=True, padding=0)
    body.add_row(figures)
    for told, fixes in _gate_findings(report):
        body.add_row(Text(""))
        body.add_row(Text(told, style="yellow"))
        for fix in fixes:
            body.add_row(Text(f"  - {fix}"))
    colour = {"go": "green", "caution": "yellow", "stop": "red"}[report["verdict"]]
    body.add_row(Text(""))
    body.add_row(Text(_VERDICTS[report["verdict"]], style=f"bold {colour}"))
    return Panel(body, title=Text("Can it learn?"), title_align="left", border_style=colour)


def plain_gate(report: Mapping[str, Any]) -> list[str]:
    """The lines of `render_gate` for a log."""
    lines = ["== Can it learn? ==", *(f"{label}: {text}" for label, text in _gate_rows(report))]
    for told, fixes in _gate_findings(report):
        lines += [told, *(f"  - {fix}" for fix in fixes)]
    return [*lines, _VERDICTS[report["verdict"]]]


# --------------------------------------------------------------------------------------------- the final card


def _with_interval(value: float | None, interval: Sequence[float] | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    sign = "+" if signed else ""
    text = f"{value:{sign}.3f}"
    return text if interval is None else f"{text} [{interval[0]:{sign}.3f}, {interval[1]:{sign}.3f}]"


def _card_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(label, start, tuned, difference) of each measure that the report has."""
    start, tuned = report.get("start", {}), report.get("tuned", {})  # both missing: there were no test problems
    rows = []
    for label, interval_key, difference_key in (
        ("score", "interval", "difference"),
        ("correct", "correct_interval", "correct_difference"),
        ("format", "format_interval", "format_difference"),
    ):
        if start.get(label) is None and tuned.get(label) is None:
            continue
        difference = report.get(difference_key) or {}
        cells = [_with_interval(side.get(label), side.get(interval_key)) for side in (start, tuned)]
        gain = _with_interval(difference.get("value"), difference.get("interval"), signed=True)
        rows.append((label, cells[0], cells[1], gain))
    return rows + _pass_rows(report)


def verdict(report: Mapping[str, Any]) -> str:
    """In words, with the two things that a proof needs: an interval above 0, and an exact test that agrees."""
    if "proven" not in report:
        return ""
    p_value = (report.get("difference") or {}).get("p_value")
    test = "" if p_value is None else f" (exact paired test: p {_p_value(p_value)})"
    if report["proven"]:
        return f"Proven: the interval of the difference lies above 0{test}."
    if report["difference"]["interval"][0] > 0 and p_value is not None and p_value < 0.05:
        failed = sum(report[side].get("failures", 0) for side in ("start", "tuned"))
        return f"Not proven: the metric failed on {failed} answers, which could explain the gain."
    if report["difference"]["interval"][0] > 0:
        return f"Not proven: there are too few problems to tell the difference from chance{test}."
    return f"Not proven: the interval of the difference does not lie above 0 on this test{test}."


def _p_value(p: float) -> str:
    """
    >>> _p_value(0.0321), _p_value(1e-9)
    ('= 0.032', '< 0.001')
    """
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def _pass_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """pass@k of both sides at 1 and at the most answers that were sampled."""
    start, tuned = (report.get(side, {}).get("pass_at_k") or {} for side in ("start", "tuned"))
    shown = [k for k in start if k in tuned and k in ("1", list(start)[-1])]
    return [(f"pass@{k}", f"{start[k]:.3f}", f"{tuned[k]:.3f}", f"{tuned[k] - start[k]:+.3f}") for k in shown]


def _change(report: Mapping[str, Any]) -> str:
    changed = report.get("changed")
    if not changed:
        return ""
    return f"better on {changed['better']} problems, worse on {changed['worse']}, the same on {changed['same']}"


def _examples(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The largest wins and losses, a line each: (label, question and both answers)."""
    examples = report.get("examples") or {}
    rows = []
    for label, key in (("win", "wins"), ("loss", "losses")):
        for example in examples.get(key, ()):
            asked, before, after = (
                cut_text(" ".join(clean_text(text).split()), limit) or "(empty)"
                for text, limit in (
                    (prompt_line(example["prompt"]), 60),
                    (example["start"], 50),
                    (example["tuned"], 50),
                )
            )
            rows.append((label, f"{asked} | {before} -> {after}"))
    return rows


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = _examples(report)
    if "steps" in report and "seconds" in report:
        early = ", ended early" if report.get("stopped_early") else ""
        facts.append(("trained", f"{report['steps']} steps in {duration(report['seconds'])}{early}"))
    if report.get("best_step") is not None:
        facts.append(("adapter of", _best_step(report)))
    if report.get("peak_memory_bytes"):
        planned = report.get("memory", {}).get("planned_bytes", {}).values()
        beside = f" (planned {size(max(planned))})" if planned else ""
        facts.append(("peak memory", size(report["peak_memory_bytes"]) + beside))
    adapter = report.get("adapter")
    if adapter:
        facts.append(("adapter", str(adapter)))
        facts += [("next", line) for line in _next_steps(str(Path(adapter).parent), report)]
    return facts


def _best_step(report: Mapping[str, Any]) -> str:
    step, score = report["best_step"], f"{report['dev_score']:.3f}"
    if step == 0:
        return f"the start: no later one had a better dev score than {score}"
    return f"step {step}, the best by dev score ({score})"


def _next_steps(run: str, report: Mapping[str, Any]) -> list[str]:
    samples = f"lowmem-grpo samples {run}"
    more = "eval.patience=0" if report.get("stopped_early") else f"run.steps={int(report.get('steps', 0)) * 2}"
    longer = f"lowmem-grpo resume {run} {more}" if report.get("steps") else ""
    use = f'PeftModel.from_pretrained(base, "{report["adapter"]}")'
    if report.get("proven", True):
        return [f"{use} uses it from Python", f"{samples} shows its answers"]
    return [line for line in (f"{longer} trains longer" if longer else "", f"{samples} shows where it fails") if line]


def _card_title(report: Mapping[str, Any]) -> str:
    if "n" not in report:
        return "Trained; there were no test problems to compare start and tuned on (data.test_size)"
    return f"Start against tuned on {report['n']} unseen problems ({report.get('split', 'test')} split)"


def render_card(report: Mapping[str, Any]) -> RenderableType:
    """The content of report.json as a card: measures with 95 % intervals, verdict, where the adapter is, what next."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_edge=False)
    for number, label in enumerate(("", "start", "tuned", "difference")):
        table.add_column(label, justify="left" if number == 0 else "right")
    proven = bool(report.get("proven"))
    measured = _card_rows(report)
    for label, start, tuned, gain in measured:
        table.add_row(label, start, tuned, Text(gain, style="green" if gain.startswith("+") else "red"))
    facts = Table.grid(padding=(0, 2))
    previous = ""
    for label, text in _facts(report):
        facts.add_row(Text("" if label == previous else label, style="dim"), Text(text, overflow="fold"))
        previous = label
    body = Table.grid(expand=True, padding=0)
    judged = Text(verdict(report), style="bold green" if proven else "bold yellow")
    for part in (table, Text(_change(report)), judged, Text(""), facts) if measured else (facts,):
        body.add_row(part)
    return Panel(
        body, title=Text(_card_title(report)), title_align="left", border_style="green" if proven else "yellow"
    )


def plain_card(report: Mapping[str, Any]) -> list[str]:
    """The lines of `render_card` for a log."""
    lines = [f"== {_card_title(report)} =="]
    for label, start, tuned, gain in _card_rows(report):
        parts = [
            f"start {start}" if start else "",
            f"tuned {tuned}" if tuned else "",
            f"difference {gain}" if gain else "",
        ]
        lines.append(f"{label}: " + "  ".join(part for part in parts if part))
    lines += [line for line in (_change(report), verdict(report)) if line]
    return [*lines, *(f"{label}: {text}" for label, text in _facts(report))]
