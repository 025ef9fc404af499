"""Says what an environment lacks to run this checkout; run by scripts/_environment.sh with the Python in question.

Prints one line for each requirement of pyproject.toml that is not met, and nothing when all is well. Reads package
metadata only, so it takes a fraction of a second. An argument adds that extra, as in `dev`.
"""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlparse

try:
    from packaging.requirements import Requirement
except ImportError:  # a new virtual environment has only pip, which carries its own copy
    from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def lacking(extras: list[str]) -> list[str]:
    """One line for each requirement that is missing or of a wrong version, and for the project itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    problems = [problem for line in wanted if (problem := _problem(Requirement(line)))]
    if not _is_installed_from_here(project["name"]):
        problems.append(f"{project['name']} is not installed from {ROOT}")
    return problems


def _problem(requirement: Requirement) -> str:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{requirement.name} {found} is installed, {requirement} is needed"


def _is_installed_from_here(name: str) -> bool:
    try:
        origin = distribution(name).read_text("direct_url.json")
    except PackageNotFoundError:
        return False
    path = urlparse(json.loads(origin or "{}").get("url", "")).path
    return bool(path) and Path(unquote(path)) == ROOT


if __name__ == "__main__":
    print("\n".join(lacking(sys.argv[1:])))
