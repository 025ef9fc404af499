"""A model repository on the hub: looked at without its weights, then fetched so that a broken download goes on.

Only what transformers loads is fetched: safetensors, JSON, text, templates, the tokenizer model; never a pickle. The
commit is fixed when looking, so what is fetched is what was looked at. Without a network (or with HF_HUB_OFFLINE=1)
a snapshot that is complete in the cache is used.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_grpo.catalog.disk import require_free
from lowmem_grpo.catalog.folder import check_file_names, check_folder, read_config, weight_files
from lowmem_grpo.catalog.progress import Progress
from lowmem_grpo.errors import ModelError

__all__ = ["HubModel", "download", "hub_cache", "look"]

_SIDE_FILES = (".json", ".txt", ".jinja", ".model")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """What is known of a repository before its weights are here.

    `files` maps each wanted file to its size in bytes, `missing_bytes` is what the cache lacks of them, `folder` is
    the snapshot when nothing is missing and no network was asked.
    """

    repo: str
    revision: str
    config: Mapping[str, Any]
    files: Mapping[str, int]
    missing_bytes: int
    folder: Path | None = None


def hub_cache(cache_dir: Path | None) -> Path:
    """The folder snapshots go to: under `cache_dir` when given, else the hub's own (HF_HOME, HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return cache_dir / "hub" if cache_dir else Path(constants.HF_HUB_CACHE)


def look(repo: str, revision: str | None, cache: Path, hint: str = "") -> HubModel:
    """Fetch the list of files and config.json, nothing else; `hint` ends the sentence of an unknown repository.

    Raises:
        ModelError: not found, gated, private, no such revision, no network and no snapshot, or no usable files.
    """
    from huggingface_hub import hf_hub_download, model_info
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError

    if revision and _COMMIT.fullmatch(revision) and (known := _snapshot(repo, revision, cache)):
        return known  # a commit never changes, so there is nothing to ask
    try:
        info = model_info(repo, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        label = f"The repository {repo}"
        check_file_names(sizes, label)
        # by branch, not by commit: this is what notes in the cache which commit the branch means when offline
        path = Path(hf_hub_download(repo, "config.json", revision=revision, cache_dir=cache))
    except (HTTPError, OSError, HFValidationError, EntryNotFoundError) as error:
        if _unreachable(error) and (known := _snapshot(repo, revision or "main", cache)):
            return known
        raise ModelError(_sentence(error, repo, revision, hint)) from error
    commit = path.parent.name
    files = {name: sizes[name] for name in _wanted(sizes)}
    missing = sum(size for name, size in files.items() if not _cached(repo, name, commit, cache))
    return HubModel(repo, commit, read_config(path, label), files, missing)


def download(model: HubModel, cache: Path, progress: Progress | None, check_disk: bool) -> Path:
    """The snapshot folder with every wanted file; what is already there is kept, a broken file is continued.

    Without `progress` the hub's own bars are shown.

    Raises:
        ModelError: too little disk (before anything is fetched), the network or the access broke, a damaged file.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HTTPError

    if model.folder:
        return model.folder
    if check_disk:
        require_free(cache, model.missing_bytes, model.repo, "HF_HOME")
    what = f"Downloading {model.repo}"
    bar = _bar_class(progress, what, model.missing_bytes) if progress else None
    try:
        folder = snapshot_download(
            model.repo,
            revision=model.revision,
            cache_dir=cache,
            allow_patterns=[glob.escape(name) for name in model.files],
            tqdm_class=bar,
        )
    except (HTTPError, OSError, EntryNotFoundError) as error:
        raise ModelError(_sentence(error, model.repo, model.revision, "")) from error
    check_folder(Path(folder), f"The download of {model.repo} in {folder}")
    if progress and model.missing_bytes:
        progress(what, model.missing_bytes, model.missing_bytes)
    return Path(folder)


def _wanted(names: Mapping[str, int]) -> list[str]:
    side = [name for name in names if name.endswith(_SIDE_FILES) and "/" not in name]
    return sorted([*weight_files(names), *side])


def _cached(repo: str, name: str, revision: str, cache: Path) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, cache_dir=cache, revision=revision)
    return Path(found) if isinstance(found, str) else None  # else None, or a marker that the file does not exist


def _snapshot(repo: str, revision: str, cache: Path) -> HubModel | None:
    """The cached snapshot of a revision when it is whole: a file appears in it only once it is complete."""
    from huggingface_hub.errors import HFValidationError

    try:
        path = _cached(repo, "config.json", revision, cache)
        if path is None:
            return None
        config, _, _ = check_folder(path.parent, f"The snapshot of {repo}")
    except (ModelError, HFValidationError):
        return None  # incomplete: the caller asks the hub, or says that there is no network
    files = {file.name: file.stat().st_size for file in path.parent.iterdir() if file.is_file()}
    return HubModel(repo, path.parent.name, config, files, 0, path.parent)


def _unreachable(error: Exception) -> bool:
    """True when it is the network or the hub that fails, not the request."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    return not isinstance(error, ValueError)


def _sentence(error: Exception, repo: str, revision: str | None, hint: str) -> str:
    """What went wrong between us and the hub, and the next step."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, GatedRepoError):  # a kind of RepositoryNotFoundError, so asked first
        return f"{repo} is gated: accept its licence at {page}, then log in with `hf auth login` (or set HF_TOKEN)."
    if isinstance(error, RepositoryNotFoundError):
        return f"There is no model {repo} that you may read on the hub; {_access_advice()}{hint}."
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; its branches, tags and commits are listed at {page}/commits/main."
    if isinstance(error, HFValidationError):
        return f"{repo!r} is not a model name: write owner/name, a short alias, or a folder as ./folder{hint}."
    if isinstance(error, HfHubHTTPError):
        return _status_sentence(error.response.status_code, repo, page)
    if isinstance(error, OfflineModeIsEnabled):
        return f"{repo} is not (completely) in the cache and HF_HUB_OFFLINE forbids to fetch it; unset it once."
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"
    return (
        f"{repo} could not be fetched ({reason}); check the connection and run the command again, it goes on where "
        "it stopped, or use smollm2-135m-instruct, which needs no hub."
    )


def _access_advice() -> str:
    from huggingface_hub import get_token

    if get_token() is None:
        return "check the spelling, or log in with `hf auth login` (or set HF_TOKEN) if it is private"
    return "check the spelling, or use a token that may read it if it is private (yours may be wrong or expired)"


def _status_sentence(status: int, repo: str, page: str) -> str:
    if status == 401:
        return (
            f"The hub refused the token when asked for {repo}; log in again with `hf auth login` or correct HF_TOKEN."
        )
    if status == 403:
        return f"The token may not read {repo}; give it read access in its settings, or ask for access at {page}."
    if status == 429:
        return (
            f"The hub limits the requests (status 429) for {repo}; wait some minutes, or log in with `hf auth login`."
        )
    return f"The hub answered with status {status} for {repo}; try again later."


def _bar_class(progress: Progress, what: str, total_bytes: int) -> type[Any]:
    """A tqdm that draws nothing and reports bytes; the hub makes one bar per kind of count and names its unit."""
    import io

    from tqdm.std import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no watching thread

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def display(self, *_args: Any, **_kwargs: Any) -> bool:
            if self.counts_bytes and total_bytes:
                progress(what, min(int(self.n), total_bytes), total_bytes)
            return True

        def close(self) -> None:
            self.disable = True  # the hub leaves some bars to the garbage collector: no report from there

    return Bar
