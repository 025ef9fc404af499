"""The verdict on a sample: figures, and findings with what to do about each."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import yaml

from lowmem_grpo.advantages import is_dead_P
from lowmem_grpo.batching import rewards_tensor
from lowmem_grpo.files import json_bytes
from lowmem_grpo.gate.crossed import gold_of
from lowmem_grpo.gate.forecast import DeadForecast, distinct_counts, forecasts_dead, tolerance
from lowmem_grpo.intervals import bootstrap_interval, paired_bootstrap_difference
from lowmem_grpo.metrics import rollout_metrics
from lowmem_grpo.rewards import text_of
from lowmem_grpo.types import Finding, Fix, Rollout, ScoredGroup

__all__ = ["GateReport", "GateSample", "GateSettings", "judge"]

MANY = 0.5
"""From this share on, dead groups and truncated answers are worth a warning."""

WORTH_WHILE = 0.1
"""Larger groups are the first advice where four times the size has so much fewer dead ones."""

MISSED_END = 0.1
"""From this share of answers on that write a special token and go on, the end token is probably wrong."""

MISSING = 0.05
"""Up to this share of answers without a reward is worth a note, more of them a warning."""

ONE_ANSWER = 1.5
"""Different answers in a group, on average, up to which its answers count as one and the same."""

ENDING_PAIRS = 8
"""Whether rewards favour answers that end is judged on at least so many groups with both kinds."""

CROSSED_CONFIDENCE = 0.8
"""So sure is enough that the own gold is the better one: a model that is seldom right is no reason for an alarm."""

CROSSED_PAIRS = 8
"""A comparison with other problems' golds needs at least so many problems whose gold differs."""


@dataclass(frozen=True, slots=True)
class GateSettings:
    """What the run is set to, as far as findings and fixes need it.

    `thinking` is the switch of the chat template, None where it is left alone. `best_reward` is the highest total that
    the rewards can give, None where that is not known (a function of the user). `gold_columns` are the columns with
    right answers that some reward reads. `lenient` is there where a reward's strict form hides right answers: the share
    of the sampled answers that are right read leniently, and the override that reads them so. `asked_forms` maps
    the label of a reward to the text it looks for literally, as in {"tags": ("<think>", "<answer>")}.
    """

    group_size: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    thinking: bool | None = None
    system_prompt: str | None = None
    best_reward: float | None = None
    gold_columns: frozenset[str] = frozenset()
    lenient: tuple[float, str] | None = None
    asked_forms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateSample:
    """What was sampled: at least one scored group, all of one size; the ids that end an answer; the tokenizer's special
    tokens by id."""

    groups: tuple[ScoredGroup, ...]
    end_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[int, str] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        """All answers."""
        return [rollout for group in self.groups for rollout in group.group.rollouts]

    @property
    def prompt_texts(self) -> list[str]:
        """The prompts as the model saw them."""
        problems = (group.group.problem for group in self.groups)
        return [problem.prompt_text or text_of(problem.prompt) for problem in problems]


@dataclass(frozen=True, slots=True)
class GateReport:
    """Verdict, figures and findings; errors come first, then what costs most.

    `answers` and `group_size` count what was sampled. Shares are in [0, 1], lengths in tokens; `missing` is the share
    of answers without a reward, `failures` the number on which a reward function failed. The reward figures are None
    without any reward; `reward_std` is over all answers. `pass_at` is there for right-or-wrong rewards: by 1 the share
    of answers that are right, by the sampled group size that of prompts with a right answer. `forecasts` is in the
    order of group sizes, and empty where nothing can be said.
    """

    verdict: Literal["go", "caution", "stop"]
    prompts: int
    answers: int
    group_size: int
    reward_mean: float | None
    reward_std: float | None
    within_group_std: float | None
    pass_at: Mapping[int, float] | None
    dead_share: float
    forecasts: tuple[DeadForecast, ...]
    truncated: float
    unique: float
    length_mean: float
    length_max: int
    missing: float
    failures: int
    findings: tuple[Finding, ...]

    @property
    def sentence(self) -> str:
        """One line for the console."""
        reward = "no reward" if self.reward_mean is None else f"mean reward {self.reward_mean:.2f}"
        return (
            f"{self.prompts} prompts x {self.group_size} answers: {reward}, {_percent(self.dead_share)} of the groups "
            f"teach nothing, {_percent(self.truncated)} of the answers cut, {self.length_mean:.0f} tokens on average"
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values, with the sentence; the keys of `pass_at` are text."""
        pass_at = None if self.pass_at is None else {str(k): share for k, share in self.pass_at.items()}
        findings = [finding.to_json() for finding in self.findings]
        values = asdict(self) | {"pass_at": pass_at, "findings": findings, "sentence": self.sentence}
        return json.loads(json_bytes(values))


def judge(sample: GateSample, settings: GateSettings, *, crossed: Sequence[ScoredGroup] | None = None) -> GateReport:
    """What the sample says about the run. `crossed` are the scored `crossed_groups` of the same answers, in order."""
    facts = _Facts(sample, settings, crossed or ())
    found = [result for check in _CHECKS if (result := check(facts)) is not None]
    found.sort(key=lambda result: (_SEVERITIES.index(result[1].severity), -result[0]))
    findings = tuple(finding for _, finding in found)
    severities = {finding.severity for finding in findings}
    rewards_N = facts.known_N
    return GateReport(
        verdict="stop" if "error" in severities else "caution" if "warning" in severities else "go",
        prompts=len(sample.groups),
        answers=len(sample.rollouts),
        group_size=facts.rewards_P_G.shape[1],
        reward_mean=facts.metrics.get("reward/mean"),
        reward_std=rewards_N.std(correction=0).item() if len(rewards_N) else None,
        within_group_std=facts.metrics.get("reward/within_group_std"),
        pass_at=facts.pass_at,
        dead_share=facts.metrics["groups/zero_variance"],
        forecasts=tuple(facts.forecasts.values()),
        truncated=facts.metrics["completion/truncated"],
        unique=facts.metrics["completion/unique"],
        length_mean=facts.metrics["completion/length_mean"],
        length_max=int(facts.metrics["completion/length_max"]),
        missing=facts.metrics["reward/missing"],
        failures=len(facts.errors),
        findings=findings,
    )


_SEVERITIES = ("error", "warning", "info")


class _Facts:
    """The sample as the checks look at it."""

    def __init__(self, sample: GateSample, settings: GateSettings, crossed: Sequence[ScoredGroup]) -> None:
        self.sample, self.settings, self.crossed = sample, settings, crossed
        self.rewards_P_G, lengths_P_G = rewards_tensor(sample.groups)
        self.dead_P = is_dead_P(self.rewards_P_G)
        self.known_N = self.rewards_P_G[~self.rewards_P_G.isnan()]
        self.metrics = rollout_metrics(sample.groups, self.rewards_P_G, lengths_P_G, self.dead_P)
        self.errors = [error for group in sample.groups for error in group.errors if error is not None]

    @property
    def is_constant(self) -> bool:
        return len(self.known_N) > 0 and len(distinct_counts(self.known_N.tolist())) == 1

    @cached_property
    def forecasts(self) -> dict[int, DeadForecast]:
        """By group size, the run's own and its neighbours; none where nothing can be said."""
        own = self.settings.group_size
        sizes = sorted({max(2, own // 2), own, 2 * own, 4 * own, 4, 8, 16})
        try:
            return {forecast.group_size: forecast for forecast in forecasts_dead(self.rewards_P_G, sizes)}
        except ValueError:
            return {}

    @property
    def pass_at(self) -> dict[int, float] | None:
        """By number of tries, for right-or-wrong rewards: how often the better of the two comes up."""
        rewards = self.known_N.tolist()
        if not rewards or len(distinct_counts(rewards)) > 2:
            return None
        right = self.best if self.is_constant else max(rewards)
        right_P_G = self.rewards_P_G >= right - tolerance(rewards)  # NaN is not
        rated_P = (~self.rewards_P_G.isnan()).any(dim=1)
        single = right_P_G.sum().item() / len(rewards)
        return {1: single, right_P_G.shape[1]: right_P_G[rated_P].any(dim=1).double().mean().item()}

    @property
    def best(self) -> float:
        """The best reward: the best possible, else the best seen, and a constant above 0 counts as that."""
        if self.settings.best_reward is not None:
            return self.settings.best_reward
        highest = self.known_N.max().item()
        return math.inf if self.is_constant and highest <= 0 else highest

    @cached_property
    def level(self) -> Literal["easy", "hard", "mixed"]:
        """What most dead groups are: at the best reward, nearer to the lowest seen, or neither."""
        rewards = self.known_N.tolist()
        values_D = self.rewards_P_G[self.dead_P].nanmean(dim=1)
        values_D = values_D[~values_D.isnan()]
        if not len(values_D):
            return "mixed"
        slack = tolerance(rewards)
        if (values_D >= self.best - slack).double().mean() > 0.5:
            return "easy"
        return "hard" if (values_D < (min(rewards) + self.best) / 2).double().mean() > 0.5 else "mixed"

    @cached_property
    def missed_ends(self) -> list[tuple[Rollout, str]]:
        """Truncated answers that wrote a special token which ends nothing and went on, with its text."""
        special = self.sample.special_tokens.keys() - self.sample.end_ids
        found = []
        for rollout in self.sample.rollouts:
            first = next((token for token in rollout.completion_ids[:-1] if token in special), None)
            if rollout.truncated and first is not None:
                found.append((rollout, self.sample.special_tokens[first]))
        return found

    @property
    def cut(self) -> float:
        """The share of answers that a higher limit might help: truncated, and no end token was missed in them."""
        return self.metrics["completion/truncated"] - len(self.missed_ends) / len(self.sample.rollouts)

    @property
    def gains_of_ending(self) -> list[float]:
        """How much more the answers that ended score than the cut ones, by group, where a group has both."""
        gains = []
        for group in self.sample.groups:
            ended, cut = list[float](), list[float]()
            for rollout, total in zip(group.group.rollouts, group.totals, strict=True):
                if total is not None:
                    (cut if rollout.truncated else ended).append(total)
            if ended and cut:
                gains.append(_mean(ended) - _mean(cut))
        return gains

    @property
    def is_thinking(self) -> bool:
        """Whether the template's thinking is on: set, or left alone while most answers think unasked."""
        if self.settings.thinking is not None:
            return self.settings.thinking
        if any("<think>" in forms for forms in self.settings.asked_forms.values()):
            return False
        texts = [
            text[-200:] + rollout.text
            for text, group in zip(self.sample.prompt_texts, self.sample.groups, strict=True)
            for rollout in group.group.rollouts
        ]
        return sum("<think>" in text and "<think>\n\n</think>" not in text for text in texts) > len(texts) / 2


_Check = Callable[[_Facts], tuple[float, Finding] | None]
"""A check gives its finding with the share of answers or groups that it costs, or None."""


def _constant_reward(facts: _Facts) -> tuple[float, Finding] | None:
    if not facts.is_constant:
        return None
    count, value = len(facts.known_N), facts.known_N[0].item()
    evidence = f"all {count} rewarded answers to {len(facts.sample.groups)} prompts score {value:.6g}{_expected(facts)}"
    if facts.level == "easy":
        cause = "every answer gets the full reward, so there is nothing left to learn"
    else:
        cause = "every answer gets the same reward, short of the full one, so there is nothing to learn from"
    return 1.0, Finding("constant reward", "error", cause, evidence, _level_fixes(facts))


def _no_spread(facts: _Facts) -> tuple[float, Finding] | None:
    if not facts.dead_P.all() or not len(facts.known_N) or facts.is_constant:
        return None
    low, high = facts.known_N.min().item(), facts.known_N.max().item()
    evidence = (
        f"0 of {len(facts.sample.groups)} groups have any spread, rewards {low:.6g} to {high:.6g}{_expected(facts)}"
    )
    cause = "the answers to one prompt never score differently, so no group teaches anything"
    return 1.0, Finding("no spread", "error", cause, evidence, _level_fixes(facts))


def _dead_groups(facts: _Facts) -> tuple[float, Finding] | None:
    forecast = facts.forecasts.get(facts.settings.group_size)
    if facts.dead_P.all() or forecast is None or forecast.share < MANY:
        return None
    low, high = forecast.interval
    evidence = (
        f"{_percent(forecast.share)} expected at {forecast.group_size} answers, {_percent(low)} to {_percent(high)}; "
        f"{int(facts.dead_P.sum())} of {len(facts.dead_P)} groups sampled"
    )
    cause = {
        "easy": "most groups teach nothing because all their answers get the full reward",
        "hard": "most groups teach nothing because all their answers score equally low",
        "mixed": "most groups teach nothing because all their answers score the same",
    }[facts.level]
    return forecast.share, Finding("dead groups", "warning", cause, evidence, _level_fixes(facts))


def _truncated(facts: _Facts) -> tuple[float, Finding] | None:
    if facts.cut < MANY:
        return None
    limit = facts.settings.max_new_tokens
    evidence = f"{_percent(facts.cut)} of the answers were cut at {limit} tokens"
    gains = facts.gains_of_ending
    if len(gains) >= ENDING_PAIRS and bootstrap_interval(gains)[0] > 0:
        evidence += f"; those that ended score {_mean(gains):.3f} more than the cut ones of their group"
        cause = "most answers do not come to an end yet, and the rewards teach them to"
        return facts.cut, Finding("truncated", "info", cause, evidence, _room_fixes(facts))
    return facts.cut, Finding(
        "truncated", "warning", "most answers do not come to an end", evidence, _room_fixes(facts)
    )


def _end_token(facts: _Facts) -> tuple[float, Finding] | None:
    share = len(facts.missed_ends) / len(facts.sample.rollouts)
    if share < MISSED_END:
        return None
    token = Counter(text for _, text in facts.missed_ends).most_common(1)[0][0]
    cause = f"the model writes {token} and goes on, so that is probably its end token and the run does not know it"
    evidence = f"{_percent(share)} of the answers hold a special token that ends nothing and are cut at the limit"
    fix = Fix(
        f"make {token} the eos_token_id in the model's generation_config.json or the eos_token of its tokenizer "
        "(rollout.stop sees plain text only, where special tokens leave nothing)"
    )
    return share, Finding("end token", "warning", cause, evidence, (fix,))


def _one_answer(facts: _Facts) -> tuple[float, Finding] | None:
    unique, size = facts.metrics["completion/unique"], facts.rewards_P_G.shape[1]
    if unique > ONE_ANSWER / size or (facts.dead_P.any() and facts.level == "easy"):
        return None
    settings = facts.settings
    fixes = []
    if settings.temperature < 1:
        fixes.append(Fix(f"sample warmer than {settings.temperature:g}", ("rollout.temperature=1.0",)))
    narrow = {"top_p": (settings.top_p, 1.0), "top_k": (settings.top_k, 0), "min_p": (settings.min_p, 0.0)}
    wide = tuple(f"rollout.{name}={off}" for name, (value, off) in narrow.items() if value != off)
    if wide:
        fixes.append(Fix("draw from all tokens", wide))
    if not fixes:
        fixes.append(Fix("sample warmer", (f"rollout.temperature={1.2 * settings.temperature:g}",)))
    cause = "the answers of a group are hardly ever different"
    evidence = f"{unique * size:.1f} different texts among {size} answers at temperature {settings.temperature:g}"
    return 1 - unique, Finding("one answer", "warning", cause, evidence, tuple(fixes))


def _missing_reward(facts: _Facts) -> tuple[float, Finding] | None:
    missing, answers = facts.metrics["reward/missing"], len(facts.sample.rollouts)
    failed = len(facts.errors) / answers
    share = max(missing, failed)
    if share == 0:
        return None
    severity: Literal["info", "warning", "error"] = (
        "error" if missing == 1 else "warning" if share > MISSING else "info"
    )
    evidence = f"{_percent(missing)} of {answers} answers have no reward, {len(facts.errors)} failures"
    if facts.errors:
        evidence += f", the first: {facts.errors[0]}"
    cause = "no answer has a reward" if missing == 1 else "some answers have no reward, and they teach nothing"
    fix = Fix("mend the reward function" if facts.errors else "see on which answers the rewards give None, and why")
    return share, Finding("missing reward", severity, cause, evidence, (fix,))


def _unmentioned_form(facts: _Facts) -> tuple[float, Finding] | None:
    texts, rollouts = facts.sample.prompt_texts, facts.sample.rollouts
    forms = dict.fromkeys(form for forms in facts.settings.asked_forms.values() for form in forms)
    written = {form: sum(form in rollout.text for rollout in rollouts) / len(rollouts) for form in forms}
    lacking = [form for form in forms if written[form] < MANY and not any(form in text for text in texts)]
    if not lacking:
        return None
    labels = [label for label, asked in facts.settings.asked_forms.items() if set(asked) & set(lacking)]
    cause = f"the reward {' and '.join(labels)} asks for {' and '.join(lacking)}, which no prompt mentions"
    shares = ", ".join(f"{form} in {_percent(written[form])}" for form in lacking)
    fix = _system_prompt_fix(lacking, facts.settings.system_prompt)
    evidence = f"none of {len(texts)} prompts; of the answers {shares}"
    return 1 - min(written[form] for form in lacking), Finding("unmentioned form", "warning", cause, evidence, (fix,))


def _wrong_answers(facts: _Facts) -> tuple[float, Finding] | None:
    columns = facts.settings.gold_columns
    if not columns or not facts.crossed:
        return None
    own, other = list[float](), list[float]()
    for group, crossed in zip(facts.sample.groups, facts.crossed, strict=True):
        mean, crossed_mean = _mean_reward(group), _mean_reward(crossed)
        is_other_gold = gold_of(group.group, columns) != gold_of(crossed.group, columns)
        if is_other_gold and mean is not None and crossed_mean is not None:
            own.append(mean)
            other.append(crossed_mean)
    if len(own) < CROSSED_PAIRS:
        return None
    difference, (low, high) = paired_bootstrap_difference(other, own, CROSSED_CONFIDENCE)
    if low > 0:
        return None
    cause = (
        "the answers score as well with another problem's gold as with their own: the golds do not belong to their "
        "prompts, or the model cannot do the task at all yet"
    )
    evidence = (
        f"mean reward {_mean(own):.3f} with the own gold, {_mean(other):.3f} with another's, over {len(own)} "
        f"problems; difference {difference:.3f}, {low:.3f} to {high:.3f} with {_percent(CROSSED_CONFIDENCE)} confidence"
    )
    fixes = (
        Fix("look whether the gold in a few rows is the answer to their prompt (a shuffled column?)"),
        Fix("name the right column", ("data.answer_column=COLUMN",)),
    )
    return 1.0, Finding("wrong answers", "warning", cause, evidence, fixes)


_CHECKS: tuple[_Check, ...] = (
    _missing_reward,
    _constant_reward,
    _no_spread,
    _wrong_answers,
    _end_token,
    _unmentioned_form,
    _dead_groups,
    _truncated,
    _one_answer,
)


# What to do about it


def _level_fixes(facts: _Facts) -> tuple[Fix, ...]:
    """What helps against groups without spread, by where their rewards lie."""
    if facts.level == "easy":
        harder = Fix("take harder problems, those that are always answered right teach nothing")
        return (harder,) if facts.is_constant else (harder, *_larger_group_fixes(facts))
    if facts.level == "mixed":
        return (
            *(_variety_fixes(facts) if facts.dead_P.all() else ()),
            *_larger_group_fixes(facts),
            Fix("take problems of middling difficulty, right now and then"),
        )
    larger = _larger_group_fixes(facts)
    own = facts.settings.group_size
    helps = own in facts.forecasts and facts.forecasts[own].share - facts.forecasts[4 * own].share >= WORTH_WHILE
    return (
        *_lenient_fixes(facts),
        *(_room_fixes(facts) if facts.cut >= MANY else ()),
        *(larger if helps else ()),
        Fix("start with easier problems"),
        Fix("give partial credit: a second reward with a smaller weight, for a part of what makes an answer right"),
        *(() if helps else larger),
        Fix(
            "warm up by supervised training on worked examples and go on from that adapter",
            ("lora.continue_from=FOLDER",),
        ),
    )


def _larger_group_fixes(facts: _Facts) -> tuple[Fix, ...]:
    own = facts.settings.group_size
    if own not in facts.forecasts:
        return ()
    now = _percent(facts.forecasts[own].share)
    return tuple(
        Fix(
            f"sample larger groups, {_percent(facts.forecasts[size].share)} dead instead of {now}",
            (f"rollout.group_size={size}",),
        )
        for size in (2 * own, 4 * own)
    )


def _lenient_fixes(facts: _Facts) -> tuple[Fix, ...]:
    """What helps where answers are right and only not in the form that is asked for."""
    if facts.settings.lenient is None:
        return ()
    share, override = facts.settings.lenient
    text = f"read leniently, {_percent(share)} of the answers are right: score that, and the form with a smaller weight"
    return (Fix(text, (override,)),)


def _variety_fixes(facts: _Facts) -> tuple[Fix, ...]:
    temperature = facts.settings.temperature
    return (
        Fix("make sure that the reward looks at the answer and not at the prompt only"),
        Fix("sample warmer", (f"rollout.temperature={max(1.0, 1.2 * temperature):g}",)),
    )


def _room_fixes(facts: _Facts) -> tuple[Fix, ...]:
    """What helps answers to come to an end."""
    longer = Fix("allow longer answers", (f"rollout.max_new_tokens={2 * facts.settings.max_new_tokens}",))
    return (longer, Fix("switch thinking off", ("data.thinking=false",))) if facts.is_thinking else (longer,)


def _system_prompt_fix(forms: Sequence[str], present: str | None) -> Fix:
    """Ask for the forms. The override holds only where shell and YAML read the same text out of it."""
    request = f"Write {' and then '.join(_describe_form(form) for form in forms)}."
    text = f"{present} {request}" if present else request
    if "'" in text or "\n" in text or not _is_plain_yaml(text):
        return Fix(f"say so in the prompt or in data.system_prompt, as in: {request}")
    return Fix("say so in the prompt or the system prompt", (f"data.system_prompt='{text}'",))


def _describe_form(form: str) -> str:
    if not (form.startswith("<") and form.endswith(">")):
        return f'"{form.strip()}" before the final answer'
    name = form[1:-1]
    what = {"think": "your reasoning", "answer": "only the final answer"}.get(name, f"the {name}")
    return f"{what} between <{name}> and </{name}>"


def _is_plain_yaml(text: str) -> bool:
    try:
        return bool(yaml.safe_load(text) == text)
    except yaml.YAMLError:
        return False


def _expected(facts: _Facts) -> str:
    """What the sample leaves possible, for verdicts that rest on not having seen a live group."""
    forecast = facts.forecasts.get(facts.settings.group_size)
    if forecast is None:
        return ""
    low, high = forecast.interval
    return f"; {_percent(low)} to {_percent(high)} dead groups expected at {forecast.group_size} answers"


def _mean_reward(group: ScoredGroup) -> float | None:
    known = [total for total in group.totals if total is not None]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
