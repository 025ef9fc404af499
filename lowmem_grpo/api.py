"""The Python API: plan, train, look at a run, load what was trained, evaluate it, try rewards.

from lowmem_grpo import load, plan, train

plan("my.yaml", card="rtx3060-12gb")["fits"]    # before anything is downloaded, for a card that need not be here
run = train("my.yaml", "run.steps=20", functions={"brevity": lambda completions, **_: [-len(c) for c in completions]})
run.metrics                     # a pandas DataFrame, one row a step
run.samples()                   # the answers of the last step, by problem
model, tokenizer = load(run)    # an ordinary peft model and tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_grpo.config import Config, LoadedConfig, load_config
from lowmem_grpo.errors import RunDirError, StopRequested
from lowmem_grpo.rundir import RUNS_ROOT, RunDir, Status

if TYPE_CHECKING:
    import pandas as pd
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

__all__ = ["Run", "baseline", "evaluate", "load", "plan", "score", "train"]

AnyConfig = Config | Mapping[str, Any] | str | Path
Functions = Mapping[str, Callable[..., Any]]


class Run:
    """A run on disk: finished, stopped, or still going in another process. Everything is read from its folder."""

    def __init__(self, folder: RunDir, functions: Functions | None = None) -> None:
        self._folder = folder
        self._functions = functions

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """The run in the folder `path`. Raises RunDirError when there is none."""
        return cls(RunDir.open(path))

    def __repr__(self) -> str:
        status = self.status
        return f"Run({str(self.path)!r}: {status.state}, step {status.step} of {status.steps})"

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def adapter(self) -> Path:
        """The best adapter so far, in peft's format. Raises RunDirError when there is none yet."""
        if not self._folder.adapter_dir.exists():
            raise RunDirError(f"{self.path} has no adapter yet: let the run reach its first checkpoint.")
        return self._folder.adapter_dir

    @property
    def status(self) -> Status:
        """Where the run stands."""
        return self._folder.status()

    @property
    def config(self) -> Config:
        """The full resolved config."""
        return load_config(self._folder.config_path).config

    @property
    def report(self) -> dict[str, Any] | None:
        """Start against tuned, time and memory; None before the run is finished."""
        return self._folder.read_report()

    @property
    def metrics(self) -> pd.DataFrame:
        """One row a step, one column a metric, indexed by step."""
        import pandas as pd

        frame = pd.DataFrame(self._folder.read("metrics"))
        return frame if frame.empty else frame.set_index("step")

    def samples(self, step: int | None = None) -> dict[str, list[dict[str, Any]]]:
        """Answers of one step (the last one when None): problem id -> rows of completions.jsonl."""
        rows = list(self._folder.read("completions"))
        if step is None and rows:
            step = rows[-1]["step"]
        grouped: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["step"] == step:
                grouped.setdefault(row["problem_id"], []).append(row)
        return grouped

    def resume(self, *overrides: str, functions: Functions | None = None) -> Run:
        """Go on in this process from the newest checkpoint, for example `run.resume("run.steps=200")`.

        `functions` are the reward functions of this process, as for `train`, which hands its own on to the run it
        returns. An interrupt saves and returns. Raises as `lowmem_grpo.lifecycle.resume_run`.
        """
        from lowmem_grpo.lifecycle import resume_run

        try:
            resume_run(self.path, overrides, functions=functions or self._functions)
        except StopRequested as stopped:
            print(stopped)
        return self


def train(
    config: AnyConfig,
    *overrides: str,
    data: Sequence[Mapping[str, Any]] | None = None,
    functions: Functions | None = None,
    run_dir: Path | str | None = None,
    force: bool = False,
) -> Run:
    """Train and return the run; an interrupt finishes the step, saves, and returns as well.

    `config` is a recipe name, a YAML file, a mapping or a Config; `overrides` are `key=value`. `data` are rows in
    memory, in place of `data.source`. `functions` are reward functions by the name the config uses; they run in this
    process. `force` trains even where the gate sees nothing to learn. Raises UserError for a wrong input, GateStopped
    when the gate says no, RunFailed when the run cannot go on.
    """
    from lowmem_grpo.lifecycle import start_run

    folder = RunDir(Path(run_dir or _new_run_dir(config)).expanduser().absolute())
    try:
        start_run(_loaded(config, overrides, data), folder.path, functions=functions, force=force)
    except StopRequested as stopped:
        print(stopped)
    return Run(folder, functions)


def plan(config: AnyConfig, *overrides: str, card: str | None = None, simulate: bool = False) -> dict[str, Any]:
    """Whether a run fits and how long it takes, as `lowmem-grpo plan --json` prints it; nothing is downloaded.

    `card` is one that need not be here (`rtx3060-12gb`, or a size as `12gb`), else the one of this machine. Sizes are
    in bytes: `fits`, `budget_bytes`, `peak_bytes`, `phases`, `items`, `suggestions`, `chosen`, `time` (seconds, hours,
    kWh) and more. `simulate` also runs one step on fake tensors, which takes up to a minute. Raises UserError for a
    wrong input.
    """
    from lowmem_grpo.catalog import card_named, detect_card
    from lowmem_grpo.planning.planner import make_plan

    loaded = _loaded(config, overrides, None).config
    planned_for = card_named(card) if card is not None else detect_card(loaded.device)
    return make_plan(loaded, planned_for, simulate=simulate).to_json()


def baseline(
    config: AnyConfig,
    *overrides: str,
    data: Sequence[Mapping[str, Any]] | None = None,
    functions: Functions | None = None,
) -> dict[str, Any]:
    """The gate alone, as `lowmem-grpo baseline --json` prints it: what the base's answers leave to learn from.

    Arguments as for `train`. Raises UserError for a wrong input.
    """
    from lowmem_grpo import lifecycle

    return lifecycle.baseline(_loaded(config, overrides, data), functions=functions).to_json()


def load(run: Run | Path | str) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The base with the run's best adapter as an ordinary peft model, and its tokenizer, ready to generate.

    Raises RunDirError when the run has no adapter yet, ModelError when the base cannot be found.
    """
    from lowmem_grpo.assembly import load_trained

    run = run if isinstance(run, Run) else Run.open(run)
    return load_trained(run.config, run.adapter)


def evaluate(run: Run | Path | str, *, functions: Functions | None = None) -> dict[str, Any]:
    """Start against tuned on the run's test split, as `lowmem-grpo eval --json` prints it."""
    from lowmem_grpo.lifecycle import evaluate_run

    run = run if isinstance(run, Run) else Run.open(run)
    return evaluate_run(run.path, functions=functions or run._functions)


def score(
    config: AnyConfig,
    completions: Sequence[Mapping[str, Any]],
    *overrides: str,
    functions: Functions | None = None,
) -> dict[str, Any]:
    """Try the rewards of a config on given answers, with no model; rows and result as `lowmem-grpo score --json`."""
    from lowmem_grpo.answers import answers_in_memory, score_answers

    return score_answers(_loaded(config, overrides, None), answers_in_memory(completions), functions=functions)


def _loaded(config: AnyConfig, overrides: Sequence[str], data: Sequence[Mapping[str, Any]] | None) -> LoadedConfig:
    source: Mapping[str, Any] | str | Path = config.model_dump() if isinstance(config, Config) else config
    extra = () if data is None else (f"data.source={json.dumps(str(_kept_rows(data)))}",)
    return load_config(source, (*overrides, *extra))


def _kept_rows(data: Sequence[Mapping[str, Any]]) -> Path:
    """Rows in memory as a file in the user's cache, named by their content, so that the run can be resumed."""
    import hashlib

    from lowmem_grpo.catalog import cache_root
    from lowmem_grpo.files import atomic_write, json_bytes

    content = b"".join(json_bytes(row) + b"\n" for row in data)
    path = cache_root() / "data" / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, content)
    return path


def _new_run_dir(config: AnyConfig) -> Path:
    from lowmem_grpo.rundir import run_name

    return RUNS_ROOT / run_name(str(config) if isinstance(config, str | Path) else "run", RUNS_ROOT)
