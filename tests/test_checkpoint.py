from __future__ import annotations

import errno
import json
import os
import signal
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from lowmem_grpo import checkpoint, faults
from lowmem_grpo.checkpoint import TrainState, latest, load, read_adapter, save, write_adapter
from lowmem_grpo.errors import RunDirError, RunFailed
from lowmem_grpo.rundir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", config_text="seed: 1\n", environment={}, inputs={})


def state_at(step: int) -> TrainState:
    """A small state whose every part depends on the step."""
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(3, 5, generator=generator)
    return TrainState(
        step=step,
        adapter={"base_model.a.lora_A.weight": weights, "base_model.a.lora_B.weight": weights.T},
        optimizer={"m": weights.double() / 3, "count": torch.tensor(step), "half": weights.bfloat16()},
        progress={"cursor": step * 4, "best": 0.1 + 0.2, "none": None, "ids": ["a", "é"]},
        offsets={"metrics": 17 * step, "completions_generation": 0},
        adapter_config={"peft_type": "LORA", "r": 4},
    )


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, list[int], list[int]]]:
    """dtype, shape and raw bytes of each tensor: NaN equals NaN, 0 is not -0."""
    return {
        name: (tensor.dtype, list(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, tensor in tensors.items()
    }


def assert_same(a: TrainState, b: TrainState) -> None:
    assert bits(a.adapter) == bits(b.adapter)
    assert bits(a.optimizer) == bits(b.optimizer)
    assert (a.step, a.progress, a.offsets, a.adapter_config) == (b.step, b.progress, b.offsets, b.adapter_config)


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed at its fault point `number` (from 1); False when it has fewer."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 on fork with threads; the child runs no torch op
        pid = os.fork()
    if pid == 0:
        reached = 0

        def kill(_: str) -> None:
            nonlocal reached
            reached += 1
            if reached == number:
                os.kill(os.getpid(), signal.SIGKILL)

        faults.on_fault_point = kill
        code = 70
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def names_of(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(faults, "on_fault_point", names.append)
        work()
    return names


def test_round_trip_is_bit_exact(run_dir: RunDir) -> None:
    numbers = torch.tensor([0.1, -0.0, float("nan"), float("inf"), 1e-45])
    state = TrainState(
        7,
        {"x": numbers, "t": torch.arange(6).reshape(2, 3).T},
        {"d": numbers.double() / 3, "i": torch.tensor(2**53 + 1), "b": torch.randn(9).bfloat16(), "e": torch.empty(0)},
        {"best": 0.1 + 0.2},
        {"metrics": 3},
        {"r": 4},
    )
    loaded = load(save(run_dir, state, keep=1))
    assert_same(loaded, state)
    assert loaded.progress["best"] == 0.30000000000000004


def test_files_of_a_checkpoint(run_dir: RunDir) -> None:
    folder = save(run_dir, state_at(20), keep=2)
    assert folder == run_dir.checkpoints_dir / "step-000020"
    files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    assert files == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert sorted(os.listdir(run_dir.checkpoints_dir)) == ["step-000020"]
    assert (folder / "adapter/adapter_model.safetensors").stat().st_mode & 0o777 == 0o644


def test_only_the_newest_are_kept_and_those_of_an_abandoned_future_go(run_dir: RunDir) -> None:
    for step in (10, 20, 30, 40):
        save(run_dir, state_at(step), keep=2)
    assert sorted(os.listdir(run_dir.checkpoints_dir)) == ["step-000030", "step-000040"]
    save(run_dir, state_at(35), keep=2)
    assert sorted(os.listdir(run_dir.checkpoints_dir)) == ["step-000030", "step-000035"]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        save(run_dir, state_at(50), keep=0)


def test_latest_without_and_with_checkpoints(run_dir: RunDir) -> None:
    assert latest(run_dir) is None
    save(run_dir, state_at(9), keep=3)
    save(run_dir, state_at(1_000_000), keep=3)
    assert latest(run_dir) == run_dir.checkpoints_dir / "step-1000000"


@pytest.mark.parametrize(
    "name", ["adapter/adapter_model.safetensors", "adapter/adapter_config.json", "optimizer.safetensors", "state.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_file_is_refused_and_an_older_checkpoint_used(run_dir: RunDir, name: str, damage: str) -> None:
    save(run_dir, state_at(10), keep=2)
    file = save(run_dir, state_at(20), keep=2) / name
    data = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    said: list[str] = []
    assert latest(run_dir, on_damaged=said.append) == run_dir.checkpoints_dir / "step-000010"
    assert len(said) == 1 and "step-000020 is damaged" in said[0] and name in said[0]
    with pytest.raises(RunDirError, match="is damaged"):
        load(run_dir.checkpoints_dir / "step-000020")
    with pytest.warns(UserWarning, match="is damaged"):
        latest(run_dir)


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.write_text, (self.target, "ran"))


@pytest.mark.parametrize("name", ["optimizer.pt", "adapter/adapter_model.bin", "RNG.PKL", "x.pth", "y.ckpt"])
def test_a_pickle_is_refused_and_not_opened(run_dir: RunDir, name: str) -> None:
    import pickle

    folder, trap = save(run_dir, state_at(10), keep=1), run_dir.path / "trap"
    (folder / name).write_bytes(pickle.dumps(_Bomb(trap)))
    os.utime(folder / name, (1, 1))
    with pytest.raises(RunDirError, match=f"pickle {name}.*only safetensors and JSON"):
        load(folder)
    assert not trap.exists()


def test_a_pickle_in_the_place_of_the_optimizer_is_refused(run_dir: RunDir) -> None:
    import pickle

    folder, trap = save(run_dir, state_at(10), keep=1), run_dir.path / "trap"
    (folder / "optimizer.safetensors").write_bytes(pickle.dumps(_Bomb(trap)))
    with pytest.raises(RunDirError, match=r"optimizer.safetensors was changed"):
        load(folder)
    assert not trap.exists()


def test_a_missing_checkpoint_and_an_unknown_format(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunDirError, match="There is no checkpoint"):
        load(run_dir.checkpoints_dir / "step-000001")
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    folder = save(run_dir, state_at(1), keep=1)
    monkeypatch.undo()
    with pytest.raises(RunDirError, match="has format 2 and this version reads 1"):
        load(folder)


# --------------------------------------------------------------------------------------------- kill -9 everywhere

FILES = ["adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"]


def _loaded(run_dir: RunDir) -> TrainState | None:
    folder = latest(run_dir)  # a damaged one would be a warning, which is an error here
    return None if folder is None else load(folder)


def test_fault_points_stand_before_between_and_after(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = [f"{word} {name}" for name in FILES for word in ("write", "wrote")]
    first = names_of(lambda: save(run_dir, state_at(10), keep=1), monkeypatch)
    moved = ["move in step-000010", "moved in step-000010", "replaced step-000010"]
    assert first == ["begin checkpoint", *writes, *moved]
    again = names_of(lambda: save(run_dir, state_at(10), keep=1), monkeypatch)
    assert again == ["begin checkpoint", *writes, "move aside step-000010", *moved]
    second = names_of(lambda: save(run_dir, state_at(20), keep=1), monkeypatch)
    assert second[-3:] == ["hide step-000010", "delete step-000010", "deleted step-000010"]


@pytest.mark.parametrize("before", [None, 10, 20], ids=["first", "with-pruning", "same-step"])
def test_killed_at_every_fault_point_of_a_save(tmp_path: Path, before: int | None) -> None:
    old = None if before is None else state_at(before)
    new = TrainState(20, state_at(21).adapter, state_at(21).optimizer, {"cursor": 1}, {"metrics": 1}, {"r": 8})
    seen_old = seen_new = number = 0
    killed = True
    while killed:
        number += 1
        run_dir = RunDir.create(tmp_path / f"run{number}", config_text="", environment={}, inputs={})
        if old is not None:
            save(run_dir, old, keep=1)
        killed = killed_at(number, partial(save, run_dir, new, keep=1))
        found = _loaded(run_dir)
        if found is not None and found.adapter_config == {"r": 8}:
            seen_new += 1
            assert_same(found, new)
        else:
            seen_old += 1
            assert (found is None) == (old is None)
            if found is not None and old is not None:
                assert_same(found, old)
        save(run_dir, state_at(30), keep=1)  # the next save finds its way and clears up
        assert os.listdir(run_dir.checkpoints_dir) == ["step-000030"]
    points = {None: 12, 10: 15, 20: 13}[before]
    assert number == points + 1
    # One rename makes it new: of the points, those after it, and the run to the end.
    after_rename = {None: 2, 10: 5, 20: 2}[before]
    assert (seen_new, seen_old) == (after_rename + 1, points - after_rename)


@pytest.mark.parametrize("exists", [False, True])
def test_killed_at_every_fault_point_of_write_adapter(tmp_path: Path, exists: bool) -> None:
    old, new = state_at(1), state_at(2)
    number, killed, contents = 0, True, []
    while killed:
        number += 1
        run_dir = RunDir.create(tmp_path / f"run{number}", config_text="", environment={}, inputs={})
        folder = run_dir.adapter_dir
        if exists:
            write_adapter(folder, old.adapter, {"r": 1})
        killed = killed_at(number, partial(write_adapter, folder, new.adapter, {"r": 2}))
        run_dir = RunDir.open(run_dir.path)
        if not folder.exists():
            contents.append(0)
        else:
            adapter, config = read_adapter(folder)
            contents.append(config["r"])
            expected = {1: old, 2: new}[config["r"]].adapter
            assert adapter.keys() == expected.keys()
            assert all(torch.equal(adapter[name], expected[name]) for name in adapter)
        write_adapter(folder, old.adapter, {"r": 3})
        assert read_adapter(folder)[1] == {"r": 3}
        assert not [name for name in os.listdir(run_dir.path) if name.startswith((".tmp-", ".replaced-"))]
    # begin, two files with two points each, (move aside,) move in | moved in, replaced, the end
    assert contents == [int(exists)] * (7 if exists else 6) + [2] * 3


def test_open_does_not_touch_an_adapter_that_is_being_replaced(run_dir: RunDir) -> None:
    write_adapter(run_dir.adapter_dir, state_at(1).adapter, {"r": 1})
    aside = run_dir.path / ".replaced-adapter"
    with run_dir.lock():
        os.rename(run_dir.adapter_dir, aside)
        RunDir.open(run_dir.path)
        assert aside.exists() and not run_dir.adapter_dir.exists()
    RunDir.open(run_dir.path)
    assert read_adapter(run_dir.adapter_dir)[1] == {"r": 1}


def test_left_over_folders_are_removed_by_the_next_save(run_dir: RunDir) -> None:
    for name in (".tmp-step-000005", ".old-step-000001"):
        (run_dir.checkpoints_dir / name / "adapter").mkdir(parents=True)
    assert latest(run_dir) is None
    save(run_dir, state_at(6), keep=1)
    assert os.listdir(run_dir.checkpoints_dir) == ["step-000006"]


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_loads(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save(run_dir, state_at(10), keep=1)

    def full(point: str) -> None:
        if point == f"wrote {name}":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(faults, "on_fault_point", full)
    with pytest.raises(RunFailed, match=r"^The disk is full: .*step-000020 could not be written"):
        save(run_dir, state_at(20), keep=1)
    monkeypatch.undo()
    assert os.listdir(run_dir.checkpoints_dir) == ["step-000010"]  # and the room of the half one is free again
    found = _loaded(run_dir)
    assert found is not None
    assert_same(found, state_at(10))


def test_the_words_of_safetensors_for_a_full_disk_are_understood(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(point: str) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(faults, "on_fault_point", full)
    with pytest.raises(RunFailed, match="The disk is full"):
        write_adapter(run_dir.adapter_dir, {}, {})


def test_an_adapter_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(RunDirError, match="is not an adapter in safetensors format"):
        read_adapter(tmp_path)


def test_peft_loads_the_adapter_as_it_is(run_dir: RunDir) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

    def base() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 4))

    tuned = get_peft_model(base(), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in tuned.peft_config["default"].to_dict().items()}
    write_adapter(run_dir.adapter_dir, get_peft_model_state_dict(tuned), json.loads(json.dumps(config, default=str)))
    loaded = PeftModel.from_pretrained(base(), run_dir.adapter_dir)
    x = torch.ones(1, 4)
    assert torch.equal(loaded(x), tuned(x))
    assert not torch.equal(loaded(x), base()(x))
