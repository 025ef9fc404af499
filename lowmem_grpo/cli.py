"""The command line, `lowmem-grpo COMMAND`: it starts runs, reads their folders, and says what went wrong in a sentence.

Exit status: 0 done, 2 a mistake of the user, 3 stopped on request, 4 failed, 5 the gate says it cannot learn. With
`--json` standard output holds JSON only, an error included (`{"error": ..., "exit_code": ...}`), and everything for
people goes to standard error.

What needs torch is imported inside the commands that train or evaluate, so that the others answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem_grpo.config import describe_fields, load_config, recipe_names
from lowmem_grpo.errors import (
    ConfigError,
    GateStopped,
    LowmemGrpoError,
    RunDirError,
    RunFailed,
    StopRequested,
    UserError,
    nearest,
)
from lowmem_grpo.files import json_bytes
from lowmem_grpo.rundir import RUNS_ROOT, RunDir, RunSummary, Status, list_runs, resolve_run, run_name
from lowmem_grpo.sinks import Sink

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

    from lowmem_grpo.planning.choosing import Suggestion
    from lowmem_grpo.planning.planner import Plan
    from lowmem_grpo.types import Card, Event, RunInfo, StepReport

__all__ = ["app", "main"]

_SHOWN_ROWS = 40

# The base of all mistakes on a command line; where it lives moved when Typer took Click in.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


# --------------------------------------------------------------------------------------------- arguments


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("lowmem-grpo")
        except importlib.metadata.PackageNotFoundError:
            version = f"(not installed, from {Path(__file__).parent})"
        print(f"lowmem-grpo {version}")
        raise typer.Exit


def _print_keys(wanted: bool) -> None:
    if wanted:
        rows = [(doc.key, doc.default or "(required)", f"{doc.help} Takes {doc.type}.") for doc in describe_fields()]
        _show(_table(("key", "default", "meaning"), rows))
        raise typer.Exit


ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help=f"A YAML file, or a built-in recipe: {', '.join(recipe_names())}.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that replace those of the config, such as rollout.group_size=8.",
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run folder, or the name of a run in runs/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
CardOption = Annotated[
    str | None, typer.Option(metavar="CARD", help="A card, here or not: rtx3060-12gb, or a size such as 12gb.")
]
ShowKeys = Annotated[
    bool, typer.Option("--keys", callback=_print_keys, is_eager=True, help="List every key of a config and stop.")
]


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Teach a small language model your own task by GRPO, on one consumer GPU.

    Begin with `lowmem-grpo train quickstart`, or with `lowmem-grpo init FILE` for a task of your own.
    """


# --------------------------------------------------------------------------------------------- commands that train


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Your rows: JSONL, JSON, CSV or Parquet.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The config to write, else FILE.yaml.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a first config for a data file.

    The rows decide columns, reward and sizes; every line is commented. Nothing is overwritten.
    """
    from lowmem_grpo.starter import REWARD_FILE, write_starter

    path = write_starter(file, out)
    rewards = [reward.name for reward in load_config(path).config.rewards]
    if as_json:
        _print_json({"config": str(path), "rewards": rewards})
        return
    print(f"Wrote {path}. Look it over, then: lowmem-grpo train {path}")
    if any(name.startswith(REWARD_FILE) for name in rewards):
        print(f"What a good answer is stands in {path.parent / REWARD_FILE}: change my_reward there first.")


@app.command()
def plan(
    config: ConfigArgument,
    overrides: Overrides = None,
    card: CardOption = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run one step on fake tensors, which takes up to a minute.")
    ] = False,
    as_json: AsJson = False,
    keys: ShowKeys = False,
) -> None:
    """Say whether a run fits and how long it takes.

    Nothing is downloaded and no GPU is needed: with --card the card need not be here, without it the plan is for this
    machine. Peak memory by phase, time, energy, disk, the settings that a run would choose, and what would save memory.
    Ends with status 0 also where the run does not fit.
    """
    loaded = load_config(config, overrides or [])
    with _at_work(as_json, lambda: "Interrupted: a plan leaves nothing behind."):
        from lowmem_grpo.catalog import card_named, detect_card
        from lowmem_grpo.planning.planner import make_plan

        planned_for = card_named(card) if card is not None else detect_card(loaded.config.device)
        made = make_plan(loaded.config, planned_for, simulate=simulate)
    if as_json:
        _print_json(made.to_json())
    else:
        _show_plan(made)


@app.command()
def baseline(
    config: ConfigArgument, overrides: Overrides = None, as_json: AsJson = False, keys: ShowKeys = False
) -> None:
    """Find out whether a config can learn, without training.

    The base answers training prompts: how the rewards spread, how many groups would teach nothing, what to change.
    `train` does the same first. Ends with status 5 where nothing can be learnt.
    """
    loaded = load_config(config, overrides or [])
    with _at_work(as_json, lambda: "Interrupted: nothing was written."):
        from lowmem_grpo.lifecycle import baseline as ask

        report = ask(loaded)
    if as_json:
        _print_json(report.to_json())
    else:
        _show_gate(report.to_json())
    if report.verdict == "stop":
        raise typer.Exit(GateStopped.exit_code)


@app.command()
def train(
    config: ConfigArgument,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder for the run, else runs/CONFIG-DATE.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Train even where the gate sees nothing to learn.")] = False,
    as_json: AsJson = False,
    keys: ShowKeys = False,
) -> None:
    """Train from the start of a config.

    First the gate: the base answers training prompts, and a run that could learn nothing ends with status 5. The end
    is a report: start against tuned on unseen problems, and where the adapter is.

    Every key of the config can be set as KEY=VALUE; `lowmem-grpo train --keys` lists them. Ctrl-C, or
    `lowmem-grpo stop` from elsewhere, finishes the step, saves and ends with status 3.
    """
    loaded = load_config(config, overrides or [])
    run = RunDir((run_dir or RUNS_ROOT / run_name(loaded.name, RUNS_ROOT)).expanduser().absolute())
    with _at_work(as_json, lambda: _what_is_lost(run)):
        from lowmem_grpo.lifecycle import start_run

        _, report = start_run(loaded, run.path, force=force)
    _tell_finished(run, report, as_json)


@app.command()
def resume(run_dir: RunArgument, overrides: Overrides = None, as_json: AsJson = False, keys: ShowKeys = False) -> None:
    """Go on with a run from its newest checkpoint.

    What leaves the mathematics alone may change, its length above all, as in run.steps=200.
    """
    run = _find_run(run_dir)
    with _at_work(as_json, lambda: _what_is_lost(run)):
        from lowmem_grpo.lifecycle import resume_run

        _, report = resume_run(run.path, overrides or [])
    _tell_finished(run, report, as_json)


@app.command()
def stop(
    run_dir: RunArgument,
    wait: Annotated[bool, typer.Option(help="Return only when the process has ended.")] = True,
    limit_s: Annotated[
        float, typer.Option("--limit", metavar="SECONDS", min=0, help="Wait no longer than this.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Save a run and end its process.

    The step it is in is finished first. `lowmem-grpo resume` goes on from there.
    """
    run = _find_run(run_dir)
    status = run.status()
    was_running = status.active
    if was_running:
        run.request("stop")
        where = f"finish step {status.step + 1} of {status.steps}" if status.steps else "load the model"
        print(f"Asked process {status.pid} to stop; it has to {where} first.", file=sys.stderr)
        if wait:
            status = _wait_for_end(run, limit_s)
    if as_json:
        place = {"run_dir": str(run.path), "was_running": was_running}
        _print_json({**place, "state": status.state, "step": status.step, "steps": status.steps})
    elif not was_running:
        print(f"There is nothing to stop: {_where(run, status)}, and no process works on it.")
    elif wait:
        print(f"{_where(run, status)}. Go on with: lowmem-grpo resume {run_dir}")


# --------------------------------------------------------------------------------------------- commands that look


@app.command()
def watch(run_dir: RunArgument, as_json: AsJson = False) -> None:
    """Show a run, live or afterwards.

    Ctrl-C ends the watching, not the run.

    With --json each line is an object with the key info, step, event, report or, at last, status.
    """
    from lowmem_grpo.sinks.console import ConsoleSink
    from lowmem_grpo.sinks.follow import follow

    run = _find_run(run_dir)
    try:
        status = follow(run, _JsonLines() if as_json else ConsoleSink())
    except KeyboardInterrupt:
        print(f"No longer watching; end the run with `lowmem-grpo stop {run_dir}`.", file=sys.stderr)
        return
    if as_json:
        _print_json({"status": dataclasses.asdict(status)}, indent=None)


@app.command()
def samples(
    run_dir: RunArgument,
    step: Annotated[int | None, typer.Option(min=1, help="The step to show, else the newest.")] = None,
    problem: Annotated[str | None, typer.Option(metavar="ID", help="Only answers to this problem.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Show so many groups at most.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Show answers, their rewards and advantages."""
    run = _find_run(run_dir)
    groups = _groups(run, step, problem)
    if as_json:
        _print_json(groups[:count])
        return
    for group in groups[:count]:
        _show_group(group)
    if len(groups) > count:
        print(f"{count} of {len(groups)} groups of step {groups[0]['step']}; --count {len(groups)} shows all.")


@app.command("eval")
def evaluate(run_dir: RunArgument, as_json: AsJson = False) -> None:
    """Compare start and tuned on unseen problems.

    A finished run has done that and only shows its report.
    """
    run = _find_run(run_dir)
    with _at_work(as_json, lambda: "Interrupted: the run itself is as it was."):
        from lowmem_grpo.lifecycle import evaluate_run

        report = evaluate_run(run.path)
    if as_json:
        _print_json(report)
    else:
        _show_card(report)


@app.command()
def score(
    config: ConfigArgument,
    completions: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Rows with problem_id or prompt, completion, and the columns that the rewards use."
        ),
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
    keys: ShowKeys = False,
) -> None:
    """Try rewards on given answers, with no model.

    The completions.jsonl of a run will do: prompts and columns are taken from the problems.jsonl beside it.
    """
    from lowmem_grpo.answers import answers_in_file, score_answers
    from lowmem_grpo.rewards import text_of

    answers = answers_in_file(completions)
    result = score_answers(load_config(config, overrides or []), answers)
    if as_json:
        _print_json(result)
    else:
        _show_scores(result, [text_of(row["completion"]) for row in answers.rows])


@app.command()
def runs(
    root: Annotated[Path, typer.Option(metavar="DIR", help="The folder that holds the runs.")] = RUNS_ROOT,
    as_json: AsJson = False,
) -> None:
    """List the runs, the last changed first."""
    if root != RUNS_ROOT and not root.is_dir():
        raise RunDirError(f"there is no folder {root}")
    found = list_runs(root.absolute())
    if as_json:
        _print_json([dataclasses.asdict(run) for run in found])
    elif found:
        _show(_table(("run", "state", "step", "reward", "model", "changed", ""), [_run_row(run) for run in found]))
    else:
        print(f"There are no runs in {root}/ yet; `lowmem-grpo train quickstart` makes one.")


@app.command()
def models(card: CardOption = None, as_json: AsJson = False) -> None:
    """List the models that are known by name.

    Any other of the same families can be named as owner/name, or as a folder. With --card, or on a machine with a GPU,
    the list says what fits: a prompt of 256 tokens, 8 answers of 512 and an adapter of rank 16.
    """
    with _at_work(as_json, lambda: "Interrupted."):
        from lowmem_grpo.planning.planner import models_for

        looked_at = _card_or_gpu(card)
        rows = models_for(looked_at)
    if as_json:
        _print_json(rows)
    else:
        _show_models(rows, looked_at)


# --------------------------------------------------------------------------------------------- running and waiting


@contextlib.contextmanager
def _at_work(as_json: bool, interrupted: Callable[[], str]) -> Iterator[None]:
    """Around what loads a model: standard output kept for JSON, interrupts as sentences."""
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            yield
    except KeyboardInterrupt:
        raise StopRequested(interrupted()) from None
    except BrokenPipeError:
        raise RunFailed(f"Whatever read the output has ended, and the run with it. {interrupted()}") from None


def _what_is_lost(run: RunDir) -> str:
    """After an interrupt that did not wait for the end of the step."""
    if not run.config_path.is_file():
        return "Interrupted before the run began, so nothing is lost: start it again."
    saved = sorted(path.name for path in run.checkpoints_dir.glob("step-*"))
    lost = f"what came after step {int(saved[-1].removeprefix('step-'))}" if saved else "the run so far"
    return f"Interrupted: {lost} is lost; go on from there with `lowmem-grpo resume {run.path}`."


def _tell_finished(run: RunDir, report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json({"run_dir": str(run.path), **report})
        return
    if "start" not in report:
        print("There were no test problems (data.test_size), so start and tuned are not compared.")
    print(f"Run folder: {run.path}")


def _wait_for_end(run: RunDir, limit_s: float) -> Status:
    """The status once no process works on the run. Raises RunFailed after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while (status := run.status()).active:
        if time.monotonic() >= end:
            raise RunFailed(
                f"{run.path} still runs after {limit_s:g} s; it will stop after its step, or ends at once, without "
                f"what came after its last checkpoint, with `kill {status.pid}` twice."
            )
        time.sleep(0.25)
    return status


def _where(run: RunDir, status: Status) -> str:
    """`quickstart-2026-01-31 is stopped at step 5 of 60`."""
    verb = "has" if status.state in ("failed", "died") else "is"
    at = f" at step {status.step} of {status.steps}" if status.steps else ""
    return f"{run.path.name} {verb} {status.state}{at}"


def _find_run(given: str) -> RunDir:
    """The run that a word on the command line means: a folder, or a name under `runs/`."""
    path = Path(given).expanduser()
    if path.name == given and not RunDir(path).config_path.is_file():
        named = resolve_run(RUNS_ROOT, given)
        path = named if named.is_dir() else path
    if path.is_dir():
        return RunDir.open(path)
    root, prefix = (RUNS_ROOT, Path()) if path.name == given else (path.parent, path.parent)
    names = [run.name for run in list_runs(root)]
    if close := nearest(path.name, names):
        hint = f"did you mean {prefix / close}?"
    elif names:
        hint = f"the newest is {prefix / names[0]}, and `lowmem-grpo runs` lists all"
    else:
        hint = f"there are no runs in {root}/"
    raise RunDirError(f"there is no run {given!r}: {hint}")


# --------------------------------------------------------------------------------------------- answers of a run


def _groups(run: RunDir, step: int | None, problem: str | None) -> list[dict[str, Any]]:
    """The groups of one step, the newest that fits unless `step` is given, with their prompts and data columns."""
    rows = _rows_of_step(run, step, problem)
    asked = {row["problem_id"]: row for row in run.read("problems")}
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        known = asked.get(row["problem_id"], {})
        head = {"step": row["step"], "problem_id": row["problem_id"], "prompt": known.get("prompt", "")}
        group = groups.setdefault(
            (row["problem_id"], row["group"]), {**head, "columns": known.get("columns", {}), "answers": []}
        )
        group["answers"].append({name: value for name, value in row.items() if name not in (*head, "group")})
    return list(groups.values())


def _rows_of_step(run: RunDir, step: int | None, problem: str | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    steps: set[int] = set()
    problems: set[str] = set()
    for row in run.read("completions"):
        steps.add(row["step"])
        if step in (None, row["step"]):
            problems.add(row["problem_id"])
            if problem in (None, row["problem_id"]):
                if rows and rows[-1]["step"] != row["step"]:
                    rows.clear()  # an older step
                rows.append(row)
    if not steps:
        raise RunDirError(f"{run.path} has no answers yet: they are written at the end of each step")
    if step is not None and step not in steps:
        raise RunDirError(f"{run.path} has no answers of step {step}: it has those of {min(steps)} to {max(steps)}")
    if not rows:
        close = nearest(str(problem), problems)
        hint = f"did you mean {close}?" if close else f"there are {len(problems)} others, such as {min(problems)}"
        raise RunDirError(f"{run.path} has no answers to {problem!r}{f' in step {step}' if step else ''}: {hint}")
    return rows


def _show_group(group: Mapping[str, Any]) -> None:
    from lowmem_grpo.sinks.follow import group_of_rows
    from lowmem_grpo.sinks.render import plain_sample, render_sample

    rows = [{"problem_id": group["problem_id"], **answer} for answer in group["answers"]]
    scored, advantages_G = group_of_rows(rows, {group["problem_id"]: group["prompt"]})
    if sys.stdout.isatty():
        _show(render_sample(group["step"], scored, advantages_G, shown=len(rows)))
    else:
        print("\n".join(plain_sample(group["step"], scored, advantages_G, shown=len(rows))))


def _show_gate(report: Mapping[str, Any]) -> None:
    from lowmem_grpo.sinks.render import plain_gate, render_gate

    if sys.stdout.isatty():
        _show(render_gate(report))
    else:
        print("\n".join(plain_gate(report)))


def _show_card(report: Mapping[str, Any]) -> None:
    from lowmem_grpo.sinks.render import plain_card, render_card

    if sys.stdout.isatty():
        _show(render_card(report))
    else:
        print("\n".join(plain_card(report)))


# --------------------------------------------------------------------------------------------- rewards without a model


def _show_scores(result: Mapping[str, Any], texts: Sequence[str]) -> None:
    """A line per answer, up to `_SHOWN_ROWS`, and what each function did."""
    labels = list(result["functions"])
    rows = []
    for row, text in list(zip(result["rows"], texts, strict=True))[:_SHOWN_ROWS]:
        scores = [_number(row["rewards"][label]) for label in labels]
        answer = row["error"] or " ".join(text.split())
        rows.append((row["problem_id"], *scores, _number(row["reward"]), _number(row["advantage"]), answer))
    _show(_table(("problem", *labels, "reward", "advantage", "answer, or what failed"), rows, cut_last=True))
    if len(texts) > _SHOWN_ROWS:
        print(f"... and {len(texts) - _SHOWN_ROWS} more; --json gives them all.")
    dead = sum(group["zero_variance"] for group in result["groups"])
    print(
        f"\n{len(texts)} answers in {len(result['groups'])} groups; {dead} scored the same throughout, teaching nothing"
    )
    for label, values in result["functions"].items():
        mean, std = _number(values["mean"]), _number(values["std"])
        print(f"{label}: mean {mean}, spread {std}, {values['failures']} failed, {values['seconds']:.2f} s")


# --------------------------------------------------------------------------------------------- plans


def _card_or_gpu(named: str | None) -> Card | None:
    """The card that was named, else the GPU of this machine, None where it has none that can be used."""
    from lowmem_grpo.catalog import card_named, detect_card

    if named is not None:
        return card_named(named)
    try:
        found = detect_card()
    except ConfigError:  # a GPU that this torch cannot use; a list of models is no place to complain about it
        return None
    return None if found.device == "cpu" else found


def _show_plan(plan: Plan) -> None:
    """The verdict first, then what it rests on."""
    from lowmem_grpo.catalog.disk import gigabytes
    from lowmem_grpo.sinks.render import size

    asked = plan.workload
    print(plan.verdict)
    if plan.refusal is not None:
        advice = plan.refusal.advice
        print(f"{advice[:1].upper()}{advice[1:]}.")
    print(
        f"Planned with {asked.group_size} answers of up to {asked.answer_tokens} tokens to each of "
        f"{asked.prompts_per_step} prompt{'s' * (asked.prompts_per_step > 1)} of up to {asked.prompt_tokens}.\n"
    )
    _show(_memory_table(plan))
    _show_largest(plan)
    _show_settings(plan)
    _show_time(plan)
    print(
        f"Longest answer that fits, in tokens: {plan.answer_limit or 'none'}; "
        f"largest group: {plan.group_limit or 'none'}.\n"
        f"Download: {gigabytes(plan.download_bytes)}; disk, with the run: {gigabytes(plan.disk_bytes)}; "
        f"host memory: {size(plan.host_ram_bytes)}."
    )
    for changes_training, title in ((False, "that leave the training as it is"), (True, "that change the training")):
        if rows := [_suggestion_row(one) for one in plan.suggestions if one.changes_training == changes_training]:
            print(f"\nChanges {title}, the best first:")
            _show(_table(("change", "setting", "saves", "peak then", "fits", "a step"), rows))
    if asked.card.device == "cpu":
        print("\nThis is the plan for a CPU; --card rtx3060-12gb, or --card 12gb, plans for a card.")


def _memory_table(plan: Plan) -> RichTable:
    """What is held in each phase, item by item, then the totals; below them what the simulation saw."""
    from lowmem_grpo.planning.budget import PHASES

    held_in = {"all": PHASES, "steps": PHASES[1:]}
    rows = []
    for item in plan.choice.estimate.items:
        if item.bytes < 0.005 * 2**30:
            continue  # it would read 0.00
        phases = held_in.get(item.phase, (item.phase,))
        rows.append((item.name, *(_gib(item.bytes) if phase in phases else "" for phase in PHASES)))
    rows.append(("planned peak", *(_gib(plan.choice.estimate.phase_bytes(phase)) for phase in PHASES)))
    if (simulation := plan.simulation) is not None:
        context = simulation.context_bytes
        peaks = [simulation.phases[phase] for phase in PHASES]
        rows.append(("simulated, allocated", *(_gib(peak.allocated_bytes + context) for peak in peaks)))
        rows.append(("simulated, reserved", *(_gib(peak.reserved_bytes + context) for peak in peaks)))
    return _table(("GiB", *PHASES), rows)


def _show_largest(plan: Plan) -> None:
    """The largest allocations at the simulated peak, and the module that made each."""
    if (simulation := plan.simulation) is None:
        return
    print(f"\nThe largest at the simulated peak, in the {simulation.peak_phase}:")
    largest = simulation.phases[simulation.peak_phase].largest
    _show(
        _table(
            ("MiB", "made by"),
            [(f"{one.bytes / 2**20:.1f}", one.where.removeprefix("base_model.model.")) for one in largest],
        )
    )


def _show_settings(plan: Plan) -> None:
    """The memory settings, which of them the config made, and why the others are not the fastest."""
    from lowmem_grpo.planning.choosing import key_of

    print()
    chosen = dataclasses.asdict(plan.choice.settings)
    by = {name: "the config" if name in plan.fixed else "the plan" for name in chosen}
    rows = [(key_of(name), json.dumps(value), by[name]) for name, value in chosen.items()]
    _show(_table(("setting", "value", "chosen by"), rows))
    for reason in plan.choice.reasons:
        print(f"  {reason}")
    print()


def _show_time(plan: Plan) -> None:
    from lowmem_grpo.sinks.render import duration

    if (time := plan.time) is None:
        print(f"Time: the speed of {plan.workload.card.name} is not known; the first steps of a run will tell.")
        return
    phases = f"{time.rollout_s:.1f} s rollout, {time.update_s:.1f} s update"
    print(f"Time: {time.step_s:.1f} s a step ({phases}), {plan.steps_by_morning} steps in 8 hours.")
    if time.run_s is not None:
        energy = "" if time.kwh is None else f" and {time.kwh:.2f} kWh"
        print(f"The run of {round(time.run_s / time.step_s)} steps: {duration(time.run_s)}{energy}.")
    print(f"  Assumed: {'; '.join(time.assumptions)}.")


def _suggestion_row(one: Suggestion) -> tuple[str, ...]:
    from lowmem_grpo.sinks.render import size

    extra = "" if one.extra_s_per_step is None else f"{one.extra_s_per_step:+.1f} s"
    fits = "yes" if one.fits else "no"
    return one.text, " ".join(one.overrides), size(one.saves_bytes), size(one.peak_bytes), fits, extra


def _show_models(rows: Sequence[Mapping[str, Any]], card: Card | None) -> None:
    from lowmem_grpo.catalog.disk import gigabytes
    from lowmem_grpo.sinks.render import size

    header = ["model", "parameters", "licence", "download"]
    cells = [
        [row["name"], f"{row['parameters'] / 1e9:.2f} B", row["licence"], gigabytes(row["download_bytes"])]
        for row in rows
    ]
    if card is not None:
        header += [f"fits {card.name}", "peak", "a step"]
        for line, row in zip(cells, rows, strict=True):
            step = "" if row["step_s"] is None else f"{row['step_s']:.1f} s"
            line += ["yes" if row["fits"] else "no", size(row["peak_bytes"]), step]
    _show(_table(header, cells))
    if card is None:
        print("\n`lowmem-grpo models --card rtx3060-12gb`, or `--card 12gb`, says which of them fit.")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:6.2f}"


# --------------------------------------------------------------------------------------------- printing


class _JsonLines(Sink):
    """A sink that prints each thing as one line of JSON."""

    def start(self, info: RunInfo) -> None:
        _print_json({"info": dataclasses.asdict(info)}, indent=None)

    def step(self, report: StepReport) -> None:
        _print_json({"step": {"step": report.step, "steps": report.steps, **report.metrics}}, indent=None)

    def event(self, event: Event) -> None:
        _print_json({"event": dataclasses.asdict(event)}, indent=None)

    def report(self, report: Mapping[str, Any]) -> None:
        _print_json({"report": report}, indent=None)


def _print_json(value: Any, *, indent: int | None = 2) -> None:
    # Through json_bytes for NaN, then in ASCII, which every console and pipe can take.
    print(json.dumps(json.loads(json_bytes(value)), indent=indent), flush=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _run_row(run: RunSummary) -> tuple[str, ...]:
    reward = "" if run.reward is None else f"{run.reward:.3f}"
    changed = datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M")
    note = run.message if run.state in ("failed", "died") else ""
    return run.name, run.state, f"{run.step}/{run.steps}", reward, run.model, changed, note


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, cut_last: bool = False) -> RichTable:
    """A table of plain text: nothing in it is read as markup. `cut_last` keeps the last column to one line."""
    from rich.table import Table as RichTable
    from rich.text import Text

    from lowmem_grpo.sinks.render import clean_text

    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for label in header[:-1]:
        table.add_column(Text(label), overflow="fold")
    table.add_column(Text(header[-1]), overflow="ellipsis" if cut_last else "fold", no_wrap=cut_last)
    for row in rows:
        table.add_row(*(Text(clean_text(cell)) for cell in row))
    return table


def _show(renderable: RenderableType) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 240)
    # Rich ends the program by itself when nobody reads; a plain print raises what `main` expects.
    with console.capture() as capture:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


# --------------------------------------------------------------------------------------------- the program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` unless given) and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    _never_fail_on_encoding()
    try:
        status = _run(words)
        sys.stdout.flush()  # here, where nobody reading can still be handled
        return status
    except BrokenPipeError:
        # `lowmem-grpo samples RUN | head` has what it wanted; the interpreter must not flush into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except LowmemGrpoError as error:
        return _fail(str(error), error.exit_code, words)
    except KeyboardInterrupt:
        return _fail("Interrupted.", StopRequested.exit_code, words)
    except Exception as error:
        traceback.print_exc()
        return _fail(f"unexpected {type(error).__name__}: {error}", RunFailed.exit_code, words)


def _run(words: Sequence[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("lowmem-grpo", list(words)) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except _UsageError as error:
        raise UserError(_usage_sentence(error)) from None
    return 0


def _fail(sentence: str, exit_code: int, words: Sequence[str]) -> int:
    prefix = "" if exit_code == StopRequested.exit_code else "error: "
    print(f"{prefix}{sentence}", file=sys.stderr)
    if "--json" in words:
        _print_json({"error": sentence, "exit_code": exit_code})
    return exit_code


def _usage_sentence(error: Any) -> str:
    """A mistake on the command line; of an option that is none, what may have been meant by it."""
    where = f"; see `{error.ctx.command_path} --help`" if error.ctx is not None else ""
    if error.ctx is None or not hasattr(error, "possibilities"):
        return f"{error.format_message().rstrip('.')}{where}"
    parameters, word = error.ctx.command.params, error.option_name.lstrip("-")
    options = [option.lstrip("-") for parameter in parameters for option in parameter.opts if option.startswith("-")]
    if close := nearest(word, options):
        return f"there is no option {error.option_name}: did you mean --{close}?"
    hint = _key_for(word.replace("-", "_")) if any(p.name == "overrides" for p in parameters) else where[2:]
    return f"there is no option {error.option_name}: {hint}"


def _key_for(word: str) -> str:
    """The key=value that was meant by an option; the config knows what other trainers call its keys."""
    if word in {doc.key for doc in describe_fields()}:
        return f"a setting has no dashes, write {word}=..."
    try:
        load_config("quickstart", [f"{word}=1"])
    except ConfigError as error:
        return f"settings are written as key=value; {error}"
    raise AssertionError(f"{word} is a key that describe_fields lacks")


def _never_fail_on_encoding() -> None:
    """Answers and names hold any character; a terminal without UTF-8 shows `?` for those that it lacks."""
    for stream in (sys.stdout, sys.stderr):
        if "utf" not in (stream.encoding or "utf-8").lower() and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
