"""From the name in a config to a folder that transformers loads: embedded, local or from the hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lowmem_grpo.catalog.disk import free_bytes
from lowmem_grpo.catalog.embedded import SMOLLM2_135M, EmbeddedSource, cache_root, embedded_folder, is_built
from lowmem_grpo.catalog.folder import check_config, check_folder, read_config
from lowmem_grpo.catalog.hub import download, hub_cache, look
from lowmem_grpo.catalog.known import KNOWN, known_model
from lowmem_grpo.catalog.progress import Progress, no_progress
from lowmem_grpo.catalog.shapes import ModelShape, model_shape
from lowmem_grpo.errors import ModelError, nearest

__all__ = [
    "ALIASES",
    "EMBEDDED",
    "ModelInfo",
    "Origin",
    "ResolvedModel",
    "embedded_source",
    "inspect_model",
    "resolve_model",
    "shape_of",
]

Origin = Literal["embedded", "local", "hub"]

EMBEDDED: tuple[EmbeddedSource, ...] = (SMOLLM2_135M,)
"""Models that need no hub."""

ALIASES: Mapping[str, str] = {name: known.repo for name, known in KNOWN.items()}
"""Short name (lower case) -> repository on the hub."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known before any weight is fetched.

    `download_bytes` is what is still to fetch, `free_bytes` the room on the disk it would go to, `cached` says that
    nothing is to be fetched, `quantized` that the weights are NF4 already. `revision` is the commit of a hub model.
    """

    name: str
    origin: Origin
    config: Mapping[str, Any]
    family: str
    download_bytes: int
    free_bytes: int
    cached: bool
    quantized: bool
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is here: `path` is what `from_pretrained` loads, `revision` the commit of a hub model, else None."""

    name: str
    path: Path
    revision: str | None
    origin: Origin
    quantized: bool
    config: Mapping[str, Any]


def inspect_model(name: str, *, revision: str | None = None, cache_dir: Path | None = None) -> ModelInfo:
    """Look at a model without fetching its weights: config, size, room, and whether it can be trained here.

    A name is, in this order: the embedded model (unless a revision is asked for), a folder (`./x`, `~/x`, `/x`, or
    one that exists), a short alias, `owner/name` on the hub. `cache_dir` replaces the user's cache folders.

    Raises:
        ModelError: unknown or unreadable, an unsupported family or quantisation, unusable files.
    """
    if source := embedded_source(name, revision):
        return _inspect_embedded(source, name, cache_dir or cache_root())
    if folder := _local(name):
        config, family, quantized = check_folder(folder, f"The folder {folder}")
        return ModelInfo(name, "local", config, family, 0, free_bytes(folder), True, quantized)
    cache = hub_cache(cache_dir)
    found = look(_repository(name), revision, cache, _hint(name))
    family, quantized = check_config(found.config, f"The repository {found.repo}")
    missing = found.missing_bytes
    return ModelInfo(
        name, "hub", found.config, family, missing, free_bytes(cache), not missing, quantized, found.revision
    )


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    check_disk: bool = True,
) -> ResolvedModel:
    """The model as a local folder, fetched, built or repaired first when it has to be.

    Names and `cache_dir` as in `inspect_model`; `progress(what, done_bytes, total_bytes)` hears about downloads.

    Raises:
        ModelError: as `inspect_model`, and when the disk is too small or the download fails.
    """
    if source := embedded_source(name, revision):
        folder = embedded_folder(
            source, root=cache_dir or cache_root(), progress=progress or no_progress, check_disk=check_disk
        )
        return ResolvedModel(name, folder, None, "embedded", False, read_config(folder / "config.json", name))
    if local := _local(name):
        config, _, quantized = check_folder(local, f"The folder {local}")
        return ResolvedModel(name, local, None, "local", quantized, config)
    cache = hub_cache(cache_dir)
    found = look(_repository(name), revision, cache, _hint(name))
    _, quantized = check_config(found.config, f"The repository {found.repo}")
    folder = download(found, cache, progress, check_disk)
    return ResolvedModel(name, folder, found.revision, "hub", quantized, found.config)


def shape_of(name: str, *, revision: str | None = None, cache_dir: Path | None = None) -> ModelShape:
    """The sizes of a model, for a plan; no weight is fetched, and of a known model nothing at all.

    Names and `cache_dir` as in `inspect_model`, but a local folder may hold a config.json alone, and the name may be
    the path of that file. A revision is asked of the hub, also of a known model.

    Raises:
        ModelError: unknown or unreadable, an unsupported family or quantisation, or a config without its sizes.
    """
    if source := embedded_source(name, revision):
        return model_shape(source.config, name)
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return model_shape(read_config(path, f"The folder {path.parent}"), name)
    if folder := _local(name):
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"The folder {folder} has no config.json, so it is not a model in the transformers layout."
            )
        return model_shape(read_config(folder / "config.json", f"The folder {folder}"), name)
    if revision is None and (known := known_model(name)):
        return model_shape(known.config, name)
    return model_shape(inspect_model(name, revision=revision, cache_dir=cache_dir).config, name)


def embedded_source(name: str, revision: str | None = None) -> EmbeddedSource | None:
    """The embedded model that a name means, in upper or lower case; None for any other, and for a revision."""
    wanted = name.lower()
    if revision:
        return None  # the embedded weights have no revisions; the repository of the same name has
    return next((s for s in EMBEDDED if wanted in (s.name.lower(), *s.aliases)), None)


def _inspect_embedded(source: EmbeddedSource, name: str, root: Path) -> ModelInfo:
    built = is_built(source, root)
    config = read_config(source.folder(root) / "config.json", source.name) if built else source.config
    family, _ = check_config(config, source.name)
    missing = 0 if built or source.carried_wheel(root).is_file() else source.download_bytes
    return ModelInfo(name, "embedded", config, family, missing, free_bytes(root), built, False)


def _local(name: str) -> Path | None:
    """The folder a name means, or None when it does not look like one."""
    path = Path(name).expanduser()
    written_as_path = name.startswith((".", "~", "/", os.sep)) or path.is_absolute()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        raise ModelError(f"{name} is a file; model.name takes the folder around it, with config.json and tokenizer.")
    if written_as_path:
        beside = [child.name for child in path.parent.iterdir() if child.is_dir()] if path.parent.is_dir() else []
        close = nearest(path.name, beside)
        raise ModelError(
            f"The folder {name} does not exist" + (f"; did you mean {path.parent / close}?" if close else ".")
        )
    return None


def _repository(name: str) -> str:
    """The repository on the hub behind a name: an alias, or owner/name as it is."""
    if "/" in name:
        return name
    if repo := ALIASES.get(name.lower()):
        return repo
    close = nearest(name.lower(), ALIASES)
    advice = f"did you mean {close}?" if close else f"known are {', '.join(ALIASES)}."
    raise ModelError(f"There is no model called {name!r} (write owner/name, or a folder as ./folder); {advice}")


def _hint(name: str) -> str:
    """`, or did you mean X` when a known repository is spelt nearly like this name."""
    close = nearest(name.rsplit("/", 1)[-1].lower(), ALIASES)
    return f", or did you mean {ALIASES[close]}" if close and ALIASES[close].lower() != name.lower() else ""
