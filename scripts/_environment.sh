# Sourced by the scripts beside it, with the extra they need (dev) or nothing. Sets ROOT, the folder of the project,
# and PYTHON, an interpreter in which it is installed.
#
# The Python that is active (a virtual environment, conda, Colab) is used as it is when it has everything. Otherwise
# ./.venv is, built or completed first. An installed torch is never replaced.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
EXTRA=${1:-}

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# What the Python $1 lacks, one line each; fails when it is too old or cannot run.
lacks() { is_new_enough "$1" && "$1" "$ROOT/scripts/_environment.py" $EXTRA; }

has_everything() { local missing; missing=$(lacks "$1" 2>/dev/null) && [ -z "$missing" ]; }

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3 python; do
        if command -v "$name" >/dev/null && is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    die "Python 3.11 or newer is needed and none of python3.11, python3.12, python3.13, python3 is: please install it."
}

make_venv() {
    local base
    base=$(find_python)
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base cannot make virtual environments: install its venv module (on Debian and Ubuntu the package python3-venv)."
    say "Making a virtual environment in $VENV with $("$base" --version)."
    "$base" -m venv --clear "$VENV"
}

install_torch() {
    local pin
    pin=$(grep '^torch==' "$ROOT/constraints.txt")
    say "Fetching ${pin/==/ }: about 0.2 GB for a CPU build, up to 3 GB for a GPU build with its CUDA libraries."
    "$VENV/bin/python" -m pip install --disable-pip-version-check "$pin" ||
        die "torch could not be installed, for the reason above; the same command goes on where it stopped."
}

install_project() {
    local torch constraints
    torch=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
    constraints=$(mktemp)
    { grep -v '^torch==' "$ROOT/constraints.txt"; echo "torch==$torch"; } >"$constraints"
    say "Installing the other packages (about 1.2 GB on disk, two or three minutes)."
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet \
        -c "$constraints" -e "$ROOT${EXTRA:+[$EXTRA]}"; then
        rm -f "$constraints"
        die "the packages could not be installed, for the reason above; the same command goes on where it stopped."
    fi
    rm -f "$constraints"
}

complete_venv() {
    local missing old_torch
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && is_new_enough "$VENV/bin/python" || make_venv
    missing=$(lacks "$VENV/bin/python")
    old_torch=$(grep '^torch .* is installed' <<<"$missing" || true)
    [ -z "$old_torch" ] || die "$old_torch: an installed torch is never replaced here, so update it in $VENV yourself, or delete $VENV."
    if grep -qx 'torch is not installed' <<<"$missing"; then install_torch; fi
    install_project
    missing=$(lacks "$VENV/bin/python")
    [ -z "$missing" ] || die "$VENV is still not complete: ${missing//$'\n'/; }."
}

ACTIVE=$(command -v python3 || true)
if [ -n "$ACTIVE" ] && has_everything "$ACTIVE"; then
    PYTHON=$ACTIVE
else
    has_everything "$VENV/bin/python" || complete_venv
    PYTHON=$VENV/bin/python
fi
