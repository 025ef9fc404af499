#!/usr/bin/env python
"""Our trainer and TRL's GRPOTrainer in turn, on one recipe, each in a process of its own.

Both train the same unquantised base with the same fresh adapter on the same problems in the same order: prompt tokens,
rewards, sampling distribution, loss, clipping, optimizer, learning rate and batch of a step are those of the recipe.
TRL gets the model and the tokenizer as objects and our rubric as its reward function; what it decides by itself
(`model.generate`, padding, its own head in chunks) stays as it is. A setting that TRL has no equal of ends the bench.

First the speed and the memory of the first steps, with groups that teach nothing kept in the update, as TRL keeps them.
TRL runs once for each `--trl-rows`, the rows of one forward and backward. Loading is not timed, and memory is counted
from what is held once everything is loaded.

    python scripts/bench_trl.py --steps 10 --json

With `--learn` what they learn: each trains with every seed, and its last adapter answers the test problems greedily,
scored by our evaluation.

    python scripts/bench_trl.py --learn --learn-steps 40 --seeds 0 1 2 --out learn.json

With `--out` every finished run is kept at once, and the same call again goes on behind the last of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lowmem_grpo import checkpoint
from lowmem_grpo.assembly import Parts, Preflight, assemble, environment, preflight, reward_files
from lowmem_grpo.catalog import resolve_model
from lowmem_grpo.config import Config, dump_config, load_config
from lowmem_grpo.data import ProblemStream, prepare
from lowmem_grpo.evaluation import evaluate
from lowmem_grpo.files import atomic_write
from lowmem_grpo.losses import loss_options
from lowmem_grpo.memory.peak import PeakProbe
from lowmem_grpo.model import LoraSpec, ModelSpec, attach_adapter, load_base, load_tokenizer
from lowmem_grpo.quiet import quiet_loading
from lowmem_grpo.rewards import Rubric
from lowmem_grpo.rundir import RunDir, StatusWriter
from lowmem_grpo.sinks import Fanout, Sink, make_sinks
from lowmem_grpo.trainer import Trainer
from lowmem_grpo.types import Group, Problem, Rollout, StepReport

CPU_NOTE = "Ratios measured on a CPU speak for CPUs only."
TRL_MISSING = "TRL is not installed: `pip install 'lowmem-grpo[bench]'`"

SAME_FOR_BOTH = (
    "model.quantization=none",
    "gate.prompts=0",
    "eval.every=0",
    "eval.patience=0",
    "eval.samples=0",
    "run.epochs=null",
    "run.sinks=[jsonl]",
)
FIRST_STEPS = ("data.dev_size=0", "data.test_size=0", "algorithm.skip_dead_groups=false")
"""Overrides of the speed measurement: nothing held out, and a dead group passes the update as it does in TRL."""

Run = dict[str, Any]
"""What a worker measured, as JSON values."""


def main() -> None:
    """Parse the arguments and be the parent of all runs, or one of its workers."""
    args = _arguments()
    if args.worker is not None:
        _work(args.worker, args.folder)
        return
    if importlib.util.find_spec("trl") is None:
        print(TRL_MISSING, file=sys.stderr)
        raise SystemExit(2)
    results = Results(args.out, _settings(args))
    if args.learn:
        _learn(args, results)
    else:
        _first_steps(args, results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--steps", type=int, default=10, help="steps to measure")
    parser.add_argument("--seed", type=int, default=0)
    rows_help = "answers in one forward and backward of TRL, may be given again (a whole step, and one group)"
    parser.add_argument("--trl-rows", type=int, action="append", help=rows_help)
    parser.add_argument("--threads", type=int, help="threads of each worker (torch's own choice)")
    parser.add_argument("--learn", action="store_true", help="measure what is learnt instead of speed and memory")
    parser.add_argument("--learn-steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="JSON file that keeps every finished run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=list(WORKERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


# -------------------------------------------------------------------------------------------- the parent


class Results:
    """The finished runs by name; with a path they are read from it, and written to it after every run."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path, self.settings = path, dict(settings)
        self.runs: dict[str, Run] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text("utf-8"))
            if kept["settings"] != self.settings:
                raise SystemExit(f"{path} holds runs of other settings ({kept['settings']}): take another --out.")
            self.runs = kept["runs"]

    def keep(self, name: str, run: Run) -> None:
        self.runs[name] = run
        self._write({})

    def finish(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The result together with the settings; it is put beside the runs in the file."""
        self._write({"result": result})
        return {"settings": self.settings, **result}

    def _write(self, more: Mapping[str, Any]) -> None:
        if self._path is not None:
            content = {"settings": self.settings, "runs": self.runs, **more}
            atomic_write(self._path, json.dumps(content, indent=1) + "\n")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs of one file have in common."""
    length = {"learn_steps": args.learn_steps} if args.learn else {"steps": args.steps, "seed": args.seed}
    return {
        "recipe": args.recipe,
        "overrides": args.overrides,
        "learn": args.learn,
        **length,
        "threads": args.threads,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "trl")},
    }


def _first_steps(args: argparse.Namespace, results: Results) -> None:
    """Measure speed and memory, and print them."""
    overrides = [*args.overrides, *SAME_FOR_BOTH, *FIRST_STEPS, f"run.steps={args.steps}", f"run.seed={args.seed}"]
    config = load_config(args.recipe, overrides).config
    answers = config.rollout.prompts_per_step * config.rollout.group_size
    rows_of_runs = _rows_of_runs(args.trl_rows or [answers, config.rollout.group_size], answers)
    job = {"recipe": args.recipe, "overrides": overrides}
    ours = _measured(results, "ours", "ours", job, args.threads)
    trl_runs = [
        _measured(results, f"trl, {rows} rows", "trl", {**job, "rows": rows}, args.threads) for rows in rows_of_runs
    ]
    if any(run["problems"] != ours["problems"] for run in trl_runs):
        raise SystemExit("The two trainers did not get the same problems: this is a mistake in the bench.")
    result = results.finish(compared(ours, trl_runs))
    print(json.dumps(result) if args.json else _table(result))


def _rows_of_runs(rows_of_runs: Sequence[int], answers: int) -> list[int]:
    for rows in rows_of_runs:
        if rows < 1 or answers % rows:
            raise SystemExit(f"--trl-rows {rows} does not divide the {answers} answers of a step.")
    return list(dict.fromkeys(rows_of_runs))


def _learn(args: argparse.Namespace, results: Results) -> None:
    """Train with every seed, score the adapters on the test problems, and print the scores."""
    config = load_config(args.recipe, [*args.overrides, *SAME_FOR_BOTH, f"run.steps={args.learn_steps}"]).config
    answers = config.rollout.prompts_per_step * config.rollout.group_size
    rows = _rows_of_runs(args.trl_rows or [answers], answers)[0]
    if config.data.test_size == 0 and config.data.test_source is None:
        raise SystemExit("--learn scores the test problems, and there are none: set data.test_size, as in 200.")
    job = {"recipe": args.recipe, "overrides": [*args.overrides, *SAME_FOR_BOTH, f"run.steps={args.learn_steps}"]}
    start = _measured(results, "start", "score", job, args.threads)
    runs: dict[str, list[Run]] = {"ours": [], "trl": []}
    for seed in args.seeds:
        seeded = {**job, "overrides": [*job["overrides"], f"run.seed={seed}"], "score": True}
        runs["ours"].append(_measured(results, f"ours, seed {seed}", "ours", seeded, args.threads))
        runs["trl"].append(
            _measured(results, f"trl, {rows} rows, seed {seed}", "trl", {**seeded, "rows": rows}, args.threads)
        )
    if any(a["problems"] != b["problems"] for a, b in zip(runs["ours"], runs["trl"], strict=True)):
        raise SystemExit("The two trainers did not get the same problems: this is a mistake in the bench.")
    scores = {name: [run["test"]["score"] for run in of_name] for name, of_name in runs.items()}
    learn = {
        "start": start["score"],
        **scores,
        "difference": statistics.fmean(scores["ours"]) - statistics.fmean(scores["trl"]),
        "n": start["n"],
        "seeds": args.seeds,
        "trl_rows": rows,
    }
    result = results.finish({"learn": learn})
    print(json.dumps(result) if args.json else _learn_table(learn))


def _measured(results: Results, name: str, kind: str, job: Run, threads: int | None) -> Run:
    """The run called `name`, from the file of results or from a worker; a trained adapter is scored when asked for."""
    if name in results.runs:
        print(f"{name}: done before", file=sys.stderr)
        return results.runs[name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
        run = _in_worker(name, kind, job, Path(folder) / "train", threads)
        if job.get("score"):
            scoring = {**job, "adapter": run["adapter"]}
            run["test"] = _in_worker(f"{name}, test", "score", scoring, Path(folder) / "score", threads)
    results.keep(name, run)
    print(f"{name}: {_told(run)}, {time.monotonic() - began:.0f} s in all", file=sys.stderr)
    return run


def _told(run: Run) -> str:
    """The figures of a finished run in a few words."""
    parts = []
    if "median_s" in run:
        parts += [f"{len(run['seconds'])} steps of {run['median_s']:.2f} s"]
        parts += [f"peak above loaded {run['peak_above_loaded_bytes'] / 2**30:.2f} GiB"]
    test = run.get("test", run)
    if "score" in test:
        parts += [f"test score {test['score']:.3f}"]
    return ", ".join(parts)


def _in_worker(name: str, kind: str, job: Run, folder: Path, threads: int | None) -> Run:
    """Run a worker to its end and return what it measured; what it prints goes to stderr while it runs."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job), "utf-8")
    surroundings = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
    if threads is not None:
        surroundings |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", kind, "--folder", str(folder)]
    last_lines: deque[str] = deque(maxlen=30)
    with subprocess.Popen(
        command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            last_lines.append(line)
            print(f"  {name}: {line}", end="", file=sys.stderr, flush=True)
    if worker.returncode != 0:
        raise SystemExit(f"{name} failed with status {worker.returncode}:\n{''.join(last_lines)}")
    return json.loads((folder / "result.json").read_text("utf-8"))


def compared(ours: Run, trl_runs: Sequence[Run]) -> dict[str, Any]:
    """Our run beside TRL's fastest, and both ratios, each against the TRL run that is best at that.

    >>> run = {"median_s": 2.0, "peak_above_loaded_bytes": 300}
    >>> other = {"median_s": 3.0, "peak_above_loaded_bytes": 200}
    >>> compared({"median_s": 1.0, "peak_above_loaded_bytes": 100}, [run, other])["ratio"]
    {'speed': 2.0, 'peak_memory': 0.5}
    """
    fastest = min(trl_runs, key=lambda run: run["median_s"])
    leanest = min(trl_runs, key=lambda run: run["peak_above_loaded_bytes"])
    ratio = {
        "speed": fastest["median_s"] / ours["median_s"],
        "peak_memory": ours["peak_above_loaded_bytes"] / leanest["peak_above_loaded_bytes"],
    }
    return {"ours": ours, "trl": fastest, "trl_runs": list(trl_runs), "ratio": ratio}


def _table(result: Mapping[str, Any]) -> str:
    ours, ratio = result["ours"], result["ratio"]
    leanest = min(result["trl_runs"], key=lambda run: run["peak_above_loaded_bytes"])
    lines = [f"{'engine':<16}{'seconds/step':>14}{'useful tokens/s':>17}{'loaded GiB':>12}{'peak above GiB':>16}"]
    for run in (ours, *result["trl_runs"]):
        lines.append(
            f"{_engine(run):<16}{run['median_s']:>14.2f}{run['tokens_per_s']:>17.1f}"
            f"{run['loaded_bytes'] / 2**30:>12.2f}{run['peak_above_loaded_bytes'] / 2**30:>16.2f}"
        )
    lines += [
        f"A step of ours is {ratio['speed']:.2f} times as fast as one of the fastest, {_engine(result['trl'])}.",
        f"Our peak above loaded is {ratio['peak_memory']:.2f} of that of the leanest, {_engine(leanest)}.",
    ]
    if ours["settings"]["device"] == "cpu":
        lines.append(CPU_NOTE)
    return "\n".join(lines)


def _engine(run: Run) -> str:
    return f"TRL, {run['settings']['rows']} rows" if run["engine"] == "trl" else "ours"


def _learn_table(learn: Mapping[str, Any]) -> str:
    lines = [f"{'seed':<8}{'start':>8}{'ours':>8}{'TRL':>8}"]
    rows = [*zip(learn["seeds"], learn["ours"], learn["trl"], strict=True)]
    for name, ours, trl in [*rows, ("mean", statistics.fmean(learn["ours"]), statistics.fmean(learn["trl"]))]:
        lines.append(f"{name!s:<8}{learn['start']:>8.3f}{ours:>8.3f}{trl:>8.3f}")
    lines.append(f"mean of ours minus mean of TRL {learn['difference']:+.3f}, {learn['n']} test problems")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------- the workers


def _work(kind: str, folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text("utf-8"))
    checked = preflight(load_config(job["recipe"], job["overrides"]))
    try:
        result = WORKERS[kind](checked, job, folder)
    finally:
        checked.close()
    (folder / "result.json").write_text(json.dumps(result), "utf-8")


class Memory:
    """What the process holds once all is loaded, and the most it held since: resident on a CPU, else allocated."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._probe = PeakProbe(device)
        on_gpu = device.type == "cuda"
        self.loaded_bytes = torch.cuda.memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
        self._probe.reset()

    def measured(self, *peaks: float) -> Run:
        """The figures; `peaks` are those noted before somebody else reset the mark."""
        peak_bytes = int(max((self._probe.peak_bytes(), *peaks)))
        return {
            "loaded_bytes": self.loaded_bytes,
            "peak_bytes": peak_bytes,
            "peak_above_loaded_bytes": peak_bytes - self.loaded_bytes,
        }


def timing(seconds: Sequence[float], tokens: Sequence[int], rewards: Sequence[float]) -> Run:
    """Figures of the steps; `tokens` counts the sampled tokens of a step, end tokens included.

    >>> timing([1.0, 3.0], [10, 30], [0.0, 0.5])["tokens_per_s"]
    10.0
    """
    return {
        "seconds": list(seconds),
        "tokens": list(tokens),
        "reward": list(rewards),
        "median_s": statistics.median(seconds),
        "mean_s": statistics.fmean(seconds),
        "tokens_per_s": sum(tokens) / sum(seconds),
    }


def _of_run(engine: str, checked: Preflight, job: Run, **more: Any) -> Run:
    settings = {
        "recipe": job["recipe"],
        "overrides": job["overrides"],
        "threads": torch.get_num_threads(),
        "device": checked.card.device,
        "device_name": checked.card.name,
        "dtype": checked.dtype,
        **more,
    }
    return {"engine": engine, "settings": settings}


def _digest(problems: Sequence[Problem]) -> str:
    """Says whether two runs got the same prompts in the same order."""
    ids = [list(problem.prompt_ids) for problem in problems]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def _problems(stream: ProblemStream, config: Config) -> list[Problem]:
    """The problems of all steps, one after the other; ends the bench when a step has fewer (the end of an epoch)."""
    assert config.run.steps is not None
    steps = [stream.at(step) for step in range(config.run.steps)]
    for step, problems in enumerate(steps, start=1):
        if len(problems) != config.rollout.prompts_per_step:
            raise SystemExit(
                f"Step {step} ends an epoch with {len(problems)} problems, which TRL would leave out: take a "
                "rollout.prompts_per_step that divides the training problems, or fewer steps."
            )
    return [problem for problems in steps for problem in problems]


class _StepClock(Sink):
    """Notes when each step was over, files written and all, as TRL's callback does."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step(self, report: StepReport) -> None:
        self.ends.append(time.monotonic())


def _ours(checked: Preflight, job: Run, folder: Path) -> Run:
    """Our trainer. What is held out stays so, and is not evaluated here."""
    config, parts = checked.config, assemble(checked)
    parts = dataclasses.replace(parts, data=dataclasses.replace(parts.data, dev=(), test=()))
    problems = _problems(parts.stream, config)
    run_dir = RunDir.create(
        folder / "run",
        config_text=dump_config(config),
        environment=environment(checked),
        inputs={name: path.read_bytes() for name, path in reward_files(config).items()},
    )
    clock = _StepClock()
    sinks = Fanout({**make_sinks(config.run.sinks, run_dir), "clock": clock}, print)
    with run_dir.lock(), StatusWriter(run_dir, steps=parts.steps) as status:
        trainer = Trainer(checked, parts, run_dir, sinks, status)
        memory = Memory(parts.policy.device)
        began = time.monotonic()
        trainer.run()
        wall_s = time.monotonic() - began
    steps = list(run_dir.read("metrics"))
    tokens = dict.fromkeys((step["step"] for step in steps), 0)
    for row in run_dir.read("completions"):
        tokens[row["step"]] += row["tokens"]
    seconds = [end - start for start, end in itertools.pairwise([began, *clock.ends])]
    peaks = [step[f"memory/{phase}_peak_bytes"] for step in steps for phase in ("rollout", "update")]
    return {
        **_of_run("ours", checked, job),
        **timing(seconds, list(tokens.values()), [s["reward/mean"] for s in steps]),
        **memory.measured(*peaks),
        "wall_s": wall_s,
        "problems": _digest(problems),
        "adapter": str(run_dir.adapter_dir),
    }


def _trl(checked: Preflight, job: Run, folder: Path) -> Run:
    """TRL's trainer on the same problems, with our rubric as its one reward function."""
    from trl import GRPOTrainer

    config = checked.config
    refuse_unlike(config)
    resolved = resolve_model(config.model.name, revision=config.model.revision)
    tokenizer = load_tokenizer(resolved.path)
    problems = _trl_problems(checked, tokenizer)
    spec = ModelSpec(resolved.path, resolved.name, quantization="none", compute_dtype=checked.dtype)
    lora = LoraSpec(config.lora.rank, config.lora.alpha, config.lora.target_modules, seed=config.run.seed)
    with quiet_loading():
        model = attach_adapter(load_base(spec, checked.card), lora)
    recorder = _recorder()
    arguments = trl_arguments(checked, job["rows"])
    trainer = GRPOTrainer(
        model=model,
        args=_trl_config(arguments, checked, folder),
        processing_class=tokenizer,
        reward_funcs=functools.partial(_total_rewards, checked.rubric, config.rollout.group_size, problems, recorder),
        train_dataset=_trl_dataset(problems),
        callbacks=[recorder],
    )
    _drop_printing(trainer)
    memory = Memory(torch.device(checked.card.device))
    began = time.monotonic()
    trainer.train()
    wall_s = time.monotonic() - began
    measured = memory.measured()
    trainer.model.save_pretrained(folder / "adapter")
    return {
        **_of_run("trl", checked, job, rows=job["rows"], trl=arguments, optim=trainer.args.optim.value),
        **timing(recorder.seconds, recorder.tokens, recorder.rewards),
        **measured,
        "wall_s": wall_s,
        "problems": _digest(problems),
        "adapter": str(folder / "adapter"),
    }


def _score(checked: Preflight, job: Run, folder: Path) -> Run:
    """Greedy answers to the test problems, by the base or by the adapter in `job["adapter"]`."""
    parts = assemble(checked)
    if "adapter" in job:
        _load_adapter(parts, Path(job["adapter"]))
    rollout = checked.config.rollout
    began = time.monotonic()
    evaluation = evaluate(
        parts.eval_engine,
        parts.data.test,
        checked.eval_rubric,
        max_new_tokens=rollout.max_new_tokens,
        stop=rollout.stop,
    )
    means = {reading: evaluation.mean(reading) for reading in evaluation.readings}
    return {**means, "n": len(evaluation.problem_ids), "seconds_of_test": time.monotonic() - began}


def _load_adapter(parts: Parts, folder: Path) -> None:
    """Put the adapter into the policy; ends the bench when its tensors are not exactly those of the policy."""
    weights, _ = checkpoint.read_adapter(folder)
    own = parts.policy.adapter_state()
    if unlike := sorted(weights.keys() ^ own.keys()):
        raise SystemExit(f"The adapter in {folder} is not of the same form as ours: {unlike[0]} is in one only.")
    parts.policy.load_adapter_state(weights)


WORKERS = {"ours": _ours, "trl": _trl, "score": _score}


# -------------------------------------------------------------------------------------------- TRL


def refuse_unlike(config: Config) -> None:
    """End the bench at a setting that TRL has no equal of."""
    algorithm, optim = config.algorithm, config.optim
    wanted = {
        "algorithm.advantage": (algorithm.advantage, "dr_grpo"),
        "algorithm.loss": (algorithm.loss, "clip"),
        "algorithm.kl_coef": (algorithm.kl_coef, 0),
        "algorithm.updates_per_rollout": (algorithm.updates_per_rollout, 1),
        "optim.schedule": (optim.schedule, "constant"),
        "optim.warmup_steps": (optim.warmup_steps, 0),
        "rollout.stop": (config.rollout.stop, ()),
        "lora.continue_from": (config.lora.continue_from, None),
    }
    for key, (value, comparable) in wanted.items():
        if value != comparable:
            raise SystemExit(f"{key} is {value!r}, and the bench compares with TRL at {comparable!r} only.")


def trl_arguments(checked: Preflight, rows: int) -> dict[str, Any]:
    """The arguments of TRL's GRPOConfig that make it do what the config says, as JSON values.

    TRL calls the aggregations as we do. Its default `scale_rewards` divides by the deviation of a group; "none" is
    reward minus mean.
    """
    config = checked.config
    rollout, optim = config.rollout, config.optim
    clipping = {**loss_options("clip"), **checked.loss_options}
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": rollout.prompts_per_step * rollout.group_size // rows,
        "max_steps": config.run.steps,
        "seed": config.run.seed,
        "shuffle_dataset": False,
        "num_generations": rollout.group_size,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p or None,
        "repetition_penalty": 1.0,
        "loss_type": config.algorithm.aggregation,
        "scale_rewards": "none",
        "epsilon": clipping["clip_low"],
        "epsilon_high": clipping["clip_high"],
        "delta": clipping["two_sided_delta"],
        "beta": 0.0,
        "num_iterations": 1,
        "learning_rate": optim.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.max_grad_norm,
        "gradient_checkpointing": bool(config.memory.activation_checkpointing),
        "bf16": checked.dtype == "bfloat16",
        "fp16": checked.dtype == "float16",
    }


def _trl_config(arguments: Mapping[str, Any], checked: Preflight, folder: Path) -> Any:
    from trl import GRPOConfig

    on_cpu = checked.card.device == "cpu"
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        report_to="none",
        push_to_hub=False,
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        **arguments,
    )


def _trl_problems(checked: Preflight, tokenizer: Any) -> list[Problem]:
    """The problems of `assemble`, without loading its policy. Ends the bench when TRL would read a prompt differently.

    The digest of the result is compared with that of our own run.
    """
    rubrics = (checked.rubric, checked.eval_rubric)

    def unusable(columns: Mapping[str, Any]) -> str | None:
        readable = all(rubric.parseable_gold(columns.get("answer")) for rubric in rubrics)
        return None if readable else "a reward cannot read its answer"

    needs_gold = any(rubric.needs_gold for rubric in rubrics)
    data = prepare(checked.raw, checked.data_spec, tokenizer, needs_gold=needs_gold, unusable=unusable)
    config = checked.config
    problems = _problems(ProblemStream(data.train, config.rollout.prompts_per_step, config.run.seed), config)
    read_by_trl = tokenizer(text=[problem.prompt_text for problem in problems])["input_ids"]
    for problem, ids in zip(problems, read_by_trl, strict=True):
        if tuple(ids) != problem.prompt_ids:
            raise SystemExit(f"TRL would read the prompt of {problem.id} as {ids}, not as {list(problem.prompt_ids)}.")
    return problems


def _trl_dataset(problems: Sequence[Problem]) -> Any:
    """One row per problem in the order of the steps; `index` leads the rewards back to the problem."""
    from datasets import Dataset

    return Dataset.from_dict(
        {"prompt": [problem.prompt_text for problem in problems], "index": list(range(len(problems)))}
    )


def _recorder() -> Any:
    """A callback of TRL that notes the seconds of each step, and what `_total_rewards` hands it."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        """A step lasts from the end of the optimizer step before it (the first: from the start of the training)."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.tokens: list[int] = []
            self.rewards: list[float] = []
            self._last = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._last = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = time.monotonic()
            self.seconds.append(now - self._last)
            self._last = now
            line = (
                f"step {state.global_step}/{state.max_steps}  {self.seconds[-1]:.2f} s  reward {self.rewards[-1]:.3f}"
            )
            print(line, file=sys.stderr)

    return Recorder()


def _total_rewards(
    rubric: Rubric,
    group_size: int,
    problems: Sequence[Problem],
    recorder: Any,
    *,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    index: Sequence[int],
    **_: Any,
) -> list[float | None]:
    """TRL's reward function: the weighted totals of our rubric, in the order of the answers of a step."""
    groups = groups_of([problems[i] for i in index], completions, completion_ids, group_size)
    totals = [total for scored in rubric.score(groups) for total in scored.totals]
    recorder.tokens.append(sum(len(ids) for ids in completion_ids))
    recorder.rewards.append(statistics.fmean(total for total in totals if total is not None))
    return totals


def groups_of(
    problem_of_answer: Sequence[Problem],
    texts: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    group_size: int,
) -> list[Group]:
    """The answers of a step, which TRL lists group after group, as our groups. Ends the bench when a group is mixed.

    The log-probabilities are 0 and the stop reason is "end": a reward sees neither.
    """
    groups = []
    for first in range(0, len(texts), group_size):
        answers = range(first, first + group_size)
        problem = problem_of_answer[first]
        if any(problem_of_answer[i] is not problem for i in answers):
            raise SystemExit(f"TRL mixed the answer to {problem.id} with those to another problem in one group.")
        rollouts = [
            Rollout(tuple(ids), (True,) * len(ids), (0.0,) * len(ids), "end", text)
            for ids, text in ((completion_ids[i], texts[i]) for i in answers)
        ]
        groups.append(Group(problem, tuple(rollouts)))
    return groups


def _drop_printing(trainer: Any) -> None:
    """transformers prints its own log to stdout where there is no progress bar."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


if __name__ == "__main__":
    main()
