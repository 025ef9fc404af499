"""The dataclasses that stages hand to each other, and the one legend of shapes.

Legend: a suffix on a name says its axes.

    P  problems of a step            B  rows (answers) of a micro-batch
    G  answers per problem           T  tokens of an answer, or of a row
    F  reward functions              N  tokens of a packed sequence
    H  hidden width                  M  tokens a loss is about
    S  slots of the sampler          V  vocabulary

The way of one step:

    Problem -> Rollout -> Group -> ScoredGroup -> advantages_P_G -> PackedMicroBatch
            -> LossInputs -> LossOutput -> StepReport

Every type is frozen; a stage never fills in a field later, it returns the next type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

__all__ = [
    "Card",
    "Event",
    "Finding",
    "Fix",
    "Group",
    "GroupSpan",
    "LossInputs",
    "LossOutput",
    "MemorySettings",
    "Message",
    "PackedMicroBatch",
    "Problem",
    "Prompt",
    "Rollout",
    "RunInfo",
    "SamplingParams",
    "ScoredGroup",
    "StepReport",
    "StopReason",
]

Message = dict[str, Any]
"""One chat message, as in `{"role": "user", "content": "..."}`."""

Prompt = str | list[Message]
"""A prompt in the form of the data set's prompt column: text, or a list of messages."""

StopReason = Literal["end", "stop", "length"]
"""Why an answer ended: an end token, a stop string, or the token limit (truncated)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the data set, ready to be answered.

    `prompt` keeps the form of the prompt column (user reward functions get it like that), `prompt_text` is the
    rendered text and `prompt_ids` are exactly the tokens the model sees. `columns` holds every other column under
    the name a reward function asks for.

    >>> Problem("train-0", "1+1", "<|user|>1+1<|bot|>", (5, 6, 7), {"answer": "2"}).columns["answer"]
    '2'
    """

    id: str
    prompt: Prompt
    prompt_text: str
    prompt_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer, token ids as the sampler chose them (never decoded and encoded again).

    `completion_ids` includes the end token when there is one. `sampled_T` marks the tokens the policy chose.
    `sampler_logprobs_T` are natural-log probabilities under the full softmax at the sampling temperature.
    `text` is the decoded answer without special tokens.

    >>> r = Rollout((9, 2), (True, True), (-0.1, -0.2), "end", "four")
    >>> len(r.completion_ids) == len(r.sampled_T) == len(r.sampler_logprobs_T)
    True
    """

    completion_ids: tuple[int, ...]
    sampled_T: tuple[bool, ...]
    sampler_logprobs_T: tuple[float, ...]
    stop_reason: StopReason
    text: str

    @property
    def truncated(self) -> bool:
        """True when the answer hit the token limit."""
        return self.stop_reason == "length"


@dataclass(frozen=True, slots=True)
class Group:
    """All answers to one problem. Two equal prompts in one step are two groups, never merged.

    >>> p = Problem("train-0", "1+1", "1+1", (5,), {})
    >>> len(Group(p, (Rollout((2,), (True,), (-0.5,), "end", ""),)).rollouts)
    1
    """

    problem: Problem
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards; every tuple has one entry per answer, in the order of `group.rollouts`.

    `scores` has one tuple per reward function (by its label). `totals` is the weighted sum; None where no reward
    can be given, and that answer then leaves the statistics. `errors` holds the last line of a traceback, or None.

    >>> p = Problem("train-0", "1+1", "1+1", (5,), {})
    >>> g = Group(p, (Rollout((2,), (True,), (-0.5,), "end", "2"),))
    >>> ScoredGroup(g, {"number": (1.0,)}, (1.0,), (None,)).totals
    (1.0,)
    """

    group: Group
    scores: Mapping[str, tuple[float | None, ...]]
    totals: tuple[float | None, ...]
    errors: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How answers are drawn. `temperature` 0 means greedy (evaluation only; training refuses it).

    top_p, top_k and min_p restrict what may be drawn; log-probs stay those of the full softmax. `top_k` 0 and
    `top_p` 1 and `min_p` 0 are off. `stop` are strings that end an answer once its text contains one.

    >>> SamplingParams(max_new_tokens=8).temperature
    1.0
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Where a group, or a part of its answers, lies in a packed sequence: the prompt once, sequences behind it.

    `start` is the index of the prompt's first token. A sequence sees the whole prompt, goes on after the first
    `shared_lengths[i]` tokens of the path of the sequence before it (none of the first one), and adds
    `answer_lengths[i]` tokens of its own; what it shares and its own tokens are its path. Positions go on from the last
    token before. Without `shared_lengths` nothing is shared, and each sequence is a whole answer.

    >>> span = GroupSpan(0, 3, (2, 4))
    >>> span.tokens
    9
    >>> span.position_ids()
    [0, 1, 2, 3, 4, 3, 4, 5, 6]

    A prompt of 3 with [a, b, c], then [a, b, d], then [a, e]; the prefix of each is the prompt and what it shares:

    >>> forks = GroupSpan(0, 3, (3, 1, 1), (0, 2, 1))
    >>> forks.position_ids()
    [0, 1, 2, 3, 4, 5, 5, 4]
    >>> [[*map(list, prefix)] for prefix in forks.prefixes()]
    [[[0, 1, 2]], [[0, 1, 2], [3, 4]], [[0, 1, 2], [3]]]
    """

    start: int
    prompt_length: int
    answer_lengths: tuple[int, ...]
    shared_lengths: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of all sequences, each once."""
        return self.prompt_length + sum(self.answer_lengths)

    def sequences(self) -> list[tuple[int, int]]:
        """(shared tokens, own tokens) of each sequence. Raises ValueError when the two do not match in number."""
        shared_lengths = self.shared_lengths or (0,) * len(self.answer_lengths)
        return list(zip(shared_lengths, self.answer_lengths, strict=True))

    def position_ids(self) -> list[int]:
        """The position of each token in its own conversation."""
        begins = [(self.prompt_length + shared, own) for shared, own in self.sequences()]
        return [*range(self.prompt_length), *(begin + t for begin, own in begins for t in range(own))]

    def prefixes(self) -> list[tuple[range, ...]]:
        """Of each sequence, where the tokens lie that all of it sees: the prompt, then those it shares, in order.

        Raises ValueError when a sequence shares more tokens than the path before it has.
        """
        prompt = range(self.start, self.start + self.prompt_length)
        prefixes: list[tuple[range, ...]] = []
        path: tuple[range, ...] = ()
        end = prompt.stop
        for shared, own in self.sequences():
            borrowed = _first_tokens(path, shared)
            prefixes.append((prompt, *borrowed))
            path = (*borrowed, range(end, end + own))
            end += own
        return prefixes


def _first_tokens(path: tuple[range, ...], count: int) -> tuple[range, ...]:
    """The first `count` tokens of a path."""
    kept: list[range] = []
    for part in path:
        if count > 0:
            kept.append(part[:count])
            count -= len(kept[-1])
    if count:
        raise ValueError(f"a sequence shares {count} tokens more than the path before it has")
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Whole groups, or parts of them, for one forward and backward, with everything the loss needs about them.

    `input_ids_N` and `position_ids_N` are one packed sequence made of `spans`: no padding, each prompt once, what
    answers to it begin with in common once, and no token that nothing is predicted from. The loss sees one row per
    answer, right-padded to the longest: `mask_BT` marks the tokens that the policy sampled, and in row-major order of
    that mask `predictors_M` are the indices in N of the tokens whose hidden states predict them (the first token of an
    answer is predicted by the last of its prompt; answers that begin alike repeat a predictor) and `targets_M` their
    ids. `weights_BT` are the fixed shares of each token in the loss of the whole update (0 off the mask), so the sum
    over all micro-batches is the same for any split.

    A prompt [5, 6] with the answers [7, 8, 2], [7, 2] and [2]: of the first [7, 8] is forwarded, of the second [7] is
    there already, of the third nothing. input_ids [5, 6, 7, 8], position_ids [0, 1, 2, 3], spans (GroupSpan(0, 2, (2,),
    (0,)),), mask [[1, 1, 1], [1, 1, 0], [1, 0, 0]], predictors [1, 2, 3, 1, 2, 1], targets [7, 8, 2, 7, 2, 2].
    """

    input_ids_N: torch.Tensor
    position_ids_N: torch.Tensor
    spans: tuple[GroupSpan, ...]
    predictors_M: torch.Tensor
    targets_M: torch.Tensor
    mask_BT: torch.Tensor
    advantages_BT: torch.Tensor
    weights_BT: torch.Tensor
    sampler_logprobs_BT: torch.Tensor
    rows: tuple[tuple[int, int], ...]
    """(group index, answer index) of each row."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss sees: tensors of one shape (B, T), nothing else.

    `logprobs_BT` carries the gradient; `old_logprobs_BT` is detached and equals it on the first pass over a rollout
    batch. `ref_logprobs_BT` is None exactly when `kl_coef` is 0. `mask_BT` is bool. `weights_BT` sums, over the whole
    update, to what the aggregation says (see `lowmem_grpo.losses`). A loss is `sum(weights * token_loss)`.
    """

    logprobs_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor | None
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    weights_BT: torch.Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The scalar to call backward on, and detached sums for the metrics.

    `sums` maps a metric name (`policy/kl`, `policy/clip_low`, `policy/clip_high`) to its sum over the tokens of the
    micro-batch; the trainer adds them up and divides by the number of tokens of the update.
    """

    loss: torch.Tensor
    sums: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did, for the sinks. `step` counts from 1. `sample` is one group of the step with its advantages.

    `metrics` uses the names of the run directory's metrics.jsonl, such as `reward/mean`.
    """

    step: int
    steps: int
    metrics: Mapping[str, float]
    sample: ScoredGroup | None
    sample_advantages_G: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth telling that is not a metric: a finding, a checkpoint, a skipped step.

    >>> Event("checkpoint", "info", "saved step 20", step=20).severity
    'info'
    """

    kind: str
    severity: Literal["info", "warning", "error"]
    message: str
    step: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fix:
    """Something to do about a finding. `overrides` are settings for the command line, as in `rollout.group_size=16`.

    >>> Fix("raise the limit", ("rollout.max_new_tokens=512",)).sentence
    'raise the limit: rollout.max_new_tokens=512'
    """

    text: str
    overrides: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The text and the settings that do it."""
        return ": ".join(part for part in (self.text, " ".join(self.overrides)) if part)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: the likely `cause`, the `evidence` with its figures, and `fixes`, the best first.

    `kind` is the stable name of the check. "error" says that nothing can come of the run as it is.

    >>> Finding("truncated", "warning", "the limit is too low", "60 % were cut", (Fix("raise it"),)).sentence
    'The limit is too low (60 % were cut): raise it.'
    """

    kind: str
    severity: Literal["info", "warning", "error"]
    cause: str
    evidence: str
    fixes: tuple[Fix, ...] = ()

    @property
    def sentence(self) -> str:
        """All of it in one sentence."""
        fixes = "; or ".join(fix.sentence for fix in self.fixes)
        return f"{self.cause[:1].upper()}{self.cause[1:]} ({self.evidence}){f': {fixes}' if fixes else ''}."

    def to_json(self) -> dict[str, Any]:
        """JSON values, for events.jsonl, gate.json and `--json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        """The inverse of `to_json`."""
        fixes = tuple(Fix(fix["text"], tuple(fix["overrides"])) for fix in values["fixes"])
        return cls(values["kind"], values["severity"], values["cause"], values["evidence"], fixes)

    def to_event(self, step: int) -> Event:
        """The finding as an event of a run."""
        return Event(self.kind, self.severity, self.sentence, step, self.to_json())


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a sink is told once, before the first step."""

    name: str
    run_dir: str
    model: str
    device: str
    steps: int
    prompts_per_step: int
    group_size: int
    max_new_tokens: int
    first_step: int = 1


@dataclass(frozen=True, slots=True)
class Card:
    """The compute device, made explicit: nothing below the trainer asks the machine again.

    `memory_bytes` is what is usable, `capability` (0, 0) on a CPU. Bandwidth, arithmetic (dense 16-bit products with
    fp32 sums) and power are those of the data sheet, 0 when unknown.

    >>> Card("cpu", "cpu", (0, 0), 8 << 30).device
    'cpu'
    """

    name: str
    device: str
    capability: tuple[int, int]
    memory_bytes: int
    bandwidth_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    watts: float = 0.0


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """How a run fits into memory; none of it changes the gradient, all of it changes the time.

    `max_concurrent` answers decode at once; prompts are forwarded up to `prefill_tokens` at a time; one forward and
    backward of the update takes `micro_batch_tokens`, its head `head_chunk_tokens`, an MLP `mlp_tile_tokens` (0: all
    at once).

    >>> MemorySettings(max_concurrent=8).micro_batch_tokens
    2048
    """

    max_concurrent: int
    prefill_tokens: int = 2048
    micro_batch_tokens: int = 2048
    activation_checkpointing: bool = True
    offload_activations: bool = False
    offload_embeddings: bool = False
    head_chunk_tokens: int = 256
    mlp_tile_tokens: int = 0
