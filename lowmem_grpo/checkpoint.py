"""Checkpoints: complete or absent, never half; only safetensors and JSON.

    checkpoints/step-000020/
        adapter/adapter_model.safetensors   loads with PeftModel.from_pretrained
        adapter/adapter_config.json
        optimizer.safetensors
        best/adapter_model.safetensors      the best adapter by dev score, where it is of an earlier step
        state.json                          step, counters, jsonl offsets, sha256 of the files above and of itself

A checkpoint is built in `.tmp-step-000020`, every file is synced, and one rename makes it visible. When step 20 is
there already (saved again after a resume) it is first moved to `.replaced-step-000020`, which `latest` still finds.
Checkpoints to delete are renamed to `.old-...` first. `save` clears what an interrupted save left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_grpo.errors import RunDirError, RunFailed
from lowmem_grpo.faults import fault_point
from lowmem_grpo.files import json_bytes, recover_folder, replace_folder, sync_folder, writing
from lowmem_grpo.rundir import RunDir

if TYPE_CHECKING:
    import torch

__all__ = ["TrainState", "clear_leftovers", "latest", "load", "read_adapter", "save", "verify", "write_adapter"]

FORMAT = 1

_STATE = "state.json"
_OPTIMIZER = "optimizer.safetensors"
_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_BEST = f"best/{_WEIGHTS}"
_NEEDED = (f"adapter/{_WEIGHTS}", f"adapter/{_CONFIG}", _OPTIMIZER)
_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class TrainState:
    """All that a resume needs. `adapter` and `optimizer` map names to tensors of any dtype and device.

    `adapter` has the key names of a peft file (`base_model.model....lora_A.weight`), `adapter_config` is the content
    of adapter_config.json, `progress` is JSON (data cursor, counters, best score), `offsets` is `RunDir.offsets()`.
    `best` holds the best adapter by dev score, None where that is `adapter` itself.

    >>> TrainState(20, {}, {}, {"cursor": 80}, {"metrics": 4096}, {"r": 16}).step
    20
    """

    step: int
    adapter: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    progress: Mapping[str, Any]
    offsets: Mapping[str, int]
    adapter_config: Mapping[str, Any]
    best: Mapping[str, torch.Tensor] | None = None


def save(run_dir: RunDir, state: TrainState, *, keep: int) -> Path:
    """Write `checkpoints/step-NNNNNN` and delete all but the newest `keep`; the path of the new one.

    Checkpoints of later steps, left from before the run went back, are deleted too. Only the holder of the run's
    lock may call this. Raises RunFailed when the disk is full; the checkpoints from before are then untouched.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    root = run_dir.checkpoints_dir
    target = root / f"step-{state.step:06d}"
    temporary = root / f".tmp-{target.name}"
    with _saving(target, temporary):
        root.mkdir(exist_ok=True)
        clear_leftovers(root)
        fault_point("begin checkpoint")
        _fill(temporary, state)
        replace_folder(temporary, target)
        _prune(root, state.step, keep)
    return target


def _fill(folder: Path, state: TrainState) -> None:
    (folder / "adapter").mkdir(parents=True)
    _write_adapter_files(folder / "adapter", state.adapter, state.adapter_config)
    _write_tensors(folder / _OPTIMIZER, state.optimizer)
    if state.best is not None:
        (folder / _BEST).parent.mkdir()
        _write_tensors(folder / _BEST, state.best)
        sync_folder((folder / _BEST).parent)
    hashed = (*_NEEDED, *((_BEST,) if state.best is not None else ()))
    content = {
        "format": FORMAT,
        "step": state.step,
        "progress": state.progress,
        "offsets": state.offsets,
        "sha256": {name: _sha256(folder / name) for name in hashed},
    }
    sealed = json_bytes({**json.loads(json_bytes(content)), "seal": _seal(content)}, indent=2)
    _write_bytes(folder / _STATE, sealed)
    sync_folder(folder)


def _write_adapter_files(folder: Path, adapter: Mapping[str, torch.Tensor], adapter_config: Mapping[str, Any]) -> None:
    _write_tensors(folder / _WEIGHTS, adapter)
    _write_bytes(folder / _CONFIG, json_bytes(adapter_config, indent=2))
    sync_folder(folder)


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    fault_point(f"write {path.name}")
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(plain, str(path), metadata={"format": "pt"})
    os.chmod(path, 0o644)  # save_file makes it readable for its owner alone
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
    fault_point(f"wrote {path.name}")


def _write_bytes(path: Path, data: bytes) -> None:
    fault_point(f"write {path.name}")
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fault_point(f"wrote {path.name}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(json.loads(json_bytes(content)), sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _saving(target: Path, temporary: Path) -> Iterator[None]:
    """`writing`, and the same sentence for a full disk that safetensors reports as its own error.

    What was written of `temporary` is deleted then, so that its room is free again.
    """
    from safetensors import SafetensorError

    try:
        with writing(target):
            yield
    except RunFailed:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except SafetensorError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise RunFailed(f"{target} could not be written: {error}.") from error
        with writing(target):
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def clear_leftovers(root: Path) -> None:
    """Finish or undo in the checkpoints folder `root` what a kill interrupted. For the holder of the run's lock."""
    for entry in sorted(root.iterdir()):
        if entry.name.startswith(".replaced-"):
            recover_folder(root / entry.name.removeprefix(".replaced-"))
        elif entry.name.startswith((".tmp-", ".old-")):
            shutil.rmtree(entry)


def _steps(root: Path) -> dict[int, Path]:
    """Step -> folder, newest first; one that was moved aside counts while its successor is not in place."""
    found: dict[int, Path] = {}
    for entry in root.iterdir() if root.is_dir() else ():
        match = _STEP.fullmatch(entry.name.removeprefix(".replaced-"))
        if match and (entry.name == match[0] or int(match[1]) not in found):
            found[int(match[1])] = entry
    return dict(sorted(found.items(), reverse=True))


def _prune(root: Path, step: int, keep: int) -> None:
    steps = _steps(root)
    kept = [s for s in steps if s <= step][:keep]
    for old, folder in steps.items():
        if old in kept:
            continue
        hidden = root / f".old-{folder.name}"
        fault_point(f"hide {folder.name}")
        os.rename(folder, hidden)
        fault_point(f"delete {folder.name}")
        shutil.rmtree(hidden)
        fault_point(f"deleted {folder.name}")


def latest(run_dir: RunDir, *, on_damaged: Callable[[str], None] = warnings.warn) -> Path | None:
    """The newest checkpoint that is whole, or None. `on_damaged` gets one sentence for each newer one that is not."""
    for folder in _steps(run_dir.checkpoints_dir).values():
        try:
            verify(folder)
        except RunDirError as error:
            on_damaged(str(error))
        else:
            return folder
    return None


def verify(path: Path) -> dict[str, Any]:
    """The content of state.json, after every hash was checked. Raises RunDirError when the checkpoint is damaged.

    A pickle anywhere in the folder is refused by its name, and never opened.
    """
    if not path.is_dir():
        raise RunDirError(f"There is no checkpoint {path}.")
    _refuse_pickles(path)
    try:
        content = json.loads((path / _STATE).read_bytes())
        seal = content.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path, f"{_STATE} cannot be read") from error
    if seal != _seal(content):
        raise _damaged(path, f"{_STATE} was changed")
    if content["format"] != FORMAT:
        raise RunDirError(
            f"The checkpoint {path} has format {content['format']} and this version reads {FORMAT}: "
            "resume with the version that wrote it."
        )
    for name in {**dict.fromkeys(_NEEDED), **content["sha256"]}:
        if not (path / name).is_file():
            raise _damaged(path, f"{name} is missing")
        if _sha256(path / name) != content["sha256"].get(name):
            raise _damaged(path, f"{name} was changed")
    return content


def _damaged(path: Path, why: str) -> RunDirError:
    return RunDirError(f"The checkpoint {path} is damaged ({why}): delete it, and an older one is used.")


def _refuse_pickles(path: Path) -> None:
    for file in sorted(path.rglob("*")):
        if file.suffix.lower() in _PICKLES:
            raise RunDirError(
                f"{path} holds the pickle {file.relative_to(path)}, which could run code when read: "
                "only safetensors and JSON are loaded, so delete that file if you know where it came from."
            )


def load(path: Path) -> TrainState:
    """The checkpoint at `path`, tensors on the CPU. Raises RunDirError when it is damaged or holds a pickle."""
    from safetensors.torch import load_file

    content = verify(path)
    adapter, adapter_config = read_adapter(path / "adapter")
    return TrainState(
        step=content["step"],
        adapter=adapter,
        optimizer=load_file(path / _OPTIMIZER),
        progress=content["progress"],
        offsets=content["offsets"],
        adapter_config=adapter_config,
        best=load_file(path / _BEST) if _BEST in content["sha256"] else None,
    )


def write_adapter(folder: Path, adapter: Mapping[str, torch.Tensor], adapter_config: Mapping[str, Any]) -> None:
    """Replace the adapter folder of a run; a reader sees the old or the new one, never a part.

    Between two renames it is absent for a moment; a kill there is undone by `RunDir.lock` and `RunDir.open`.
    Raises RunFailed when the disk is full; the old adapter is then untouched.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    with _saving(folder, temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        recover_folder(folder)
        fault_point(f"begin {folder.name}")
        temporary.mkdir()
        _write_adapter_files(temporary, adapter, adapter_config)
        replace_folder(temporary, folder)


def read_adapter(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and config of an adapter folder in peft's format. Raises RunDirError when it is not one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _refuse_pickles(folder)
    try:
        return load_file(folder / _WEIGHTS), json.loads((folder / _CONFIG).read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise RunDirError(f"{folder} is not an adapter in safetensors format: {error}.") from error
