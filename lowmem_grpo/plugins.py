"""Plug-ins by name: a built-in name, or a function in the user's own file as "path/file.py:function".

Nothing is searched or guessed: a spec that cannot be found is refused with one sentence that lists the choices.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lowmem_grpo.errors import PluginError, nearest

__all__ = ["is_file_spec", "load_object", "split_file_spec"]


def is_file_spec(spec: str) -> bool:
    """True for something meant as a file ("rewards.py:score", "my/rewards.py"), False for a built-in name.

    >>> is_file_spec("rewards.py:score"), is_file_spec("number")
    (True, False)
    """
    return ":" in spec or "/" in spec or "\\" in spec or spec.endswith(".py")


def split_file_spec(spec: str, *, kind: str, base_dir: Path) -> tuple[Path, str]:
    """The file and the function that "path/file.py:function" means; the file is known to exist.

    A relative path counts from `base_dir`. Raises PluginError when the function is not named or there is no file.
    """
    path_text, colon, function = spec.rpartition(":")
    if not colon or not function or function.endswith(".py") or "/" in function or "\\" in function:
        raise PluginError(f"{kind} '{spec}' names no function: write it as '{spec.removesuffix(':')}:function_name'")
    path = (base_dir / Path(path_text).expanduser()).resolve()
    if not path.is_file():
        raise PluginError(f"{kind} '{spec}': {_why_no_file(path)}")
    return path, function


def load_object(spec: str, *, registry: Mapping[str, Any], kind: str, base_dir: Path) -> Any:
    """What `spec` stands for: `registry[spec]`, or a function of the user's file (relative to `base_dir`).

    `kind` ("reward", "sink") is the word for it in messages. The file's own folder and `base_dir` can be imported
    from inside it. A file runs once per content: a second function of it shares its module, an edited file is new.
    Raises PluginError: an unknown name, a missing file or function, a file that raises when it is run.
    """
    if not is_file_spec(spec):
        if spec not in registry:
            raise PluginError(_unknown_name(spec, registry, kind))
        return registry[spec]
    path, name = split_file_spec(spec, kind=kind, base_dir=base_dir)
    module = _run_file(path, spec, kind, base_dir)
    found = getattr(module, name, None)
    if callable(found):
        return found
    functions = sorted(_functions_of(module))
    if found is not None:
        raise PluginError(f"{kind} '{spec}': '{name}' in {path.name} is a {type(found).__name__}, not a function")
    hint = f"; did you mean '{near}'?" if (near := nearest(name, functions)) else ""
    listed = f"it has {', '.join(functions)}" if functions else "it defines no function"
    raise PluginError(f"{kind} '{spec}': there is no function '{name}' in {path.name}, {listed}{hint}")


def _unknown_name(name: str, registry: Mapping[str, Any], kind: str) -> str:
    hint = f"did you mean '{near}'? " if (near := nearest(name, registry)) else ""
    choices = ", ".join(sorted(registry))
    return f"unknown {kind} '{name}': {hint}Choices: {choices}, or your own as 'path/file.py:function'"


def _why_no_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder, not a Python file"
    siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    hint = f"; did you mean '{near}'?" if (near := nearest(path.name, siblings)) else ""
    return f"there is no file {path}{hint}"


def _run_file(path: Path, spec: str, kind: str, base_dir: Path) -> ModuleType:
    """The module of `path`, run under a name of its own, so that two files of one stem do not collide."""
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:16]
    module_name = f"lowmem_grpo_plugin_{path.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    for folder in (str(path.parent), str(base_dir.resolve())):
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that a user's json.py hides nothing of the standard library
    module_spec = importlib.util.spec_from_file_location(module_name, path, loader=_loader(module_name, path))
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # before it runs: dataclasses look their module up there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise PluginError(f"{kind} '{spec}': {path.name} {_where(error, path)}") from error
    return module


def _loader(module_name: str, path: Path) -> importlib.machinery.SourceFileLoader:
    """A loader for any file name: the user's file need not end in .py."""
    return importlib.machinery.SourceFileLoader(module_name, str(path))


def _where(error: BaseException, path: Path) -> str:
    last_line = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno]
    where = f"at line {lines[-1]}" if lines and lines[-1] else "when it was read"
    return f"fails {where}: {last_line}"


def _functions_of(module: ModuleType) -> list[str]:
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return [name for name in own if not name.startswith("_") and callable(getattr(module, name))]
