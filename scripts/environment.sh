# Sourced by the other scripts: makes the virtual environment, once per change of what it is made from.
# shellcheck shell=sh

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
stop() { printf 'error: %s\n  try: %s\n' "$1" "$2" >&2; exit 5; }

find_python() {
    for name in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        [ -n "$name" ] || continue
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            # The interpreter itself: a version manager's shim would cost its start-up time at every call.
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    stop "Skep needs Python 3.11 or newer, and none was found" "install python3 (3.11+), or set PYTHON to one"
}

make_venv() {
    [ -x .venv/bin/python ] && .venv/bin/python -c 'import pip' 2>/dev/null && return
    python=$(find_python)
    say "Making a virtual environment with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv 2>/dev/null && return
    # Debian and Ubuntu ship Python without the part that puts pip into a new environment.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "Installing python3-venv"
        apt-get install -y -qq python3-venv >/dev/null || { apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; }
        rm -rf .venv
        "$python" -m venv .venv && return
    fi
    rm -rf .venv
    if "$python" -m venv --without-pip .venv && "$python" -m pip --python .venv/bin/python install -q pip; then return; fi
    rm -rf .venv
    stop "$python cannot make a virtual environment" "sudo apt-get install python3-venv"
}

# install [EXTRAS]: install Skep from this folder, with extras such as [dev], unless nothing has changed since.
install() {
    made_from=$(cat pyproject.toml constraints.txt hatch_build.py src/skep/sandbox/native/* | cksum)
    stamp=.venv/skep-installed
    if [ "$(cat $stamp 2>/dev/null)" = "$1 $made_from" ] || [ "$(cat $stamp 2>/dev/null)" = "[dev] $made_from" ]; then
        return
    fi
    say "Installing Skep${1:+ with $1} (pinned by constraints.txt; what pip says goes to .venv/install.log)"
    { .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".$1" 2>&1; echo $? > .venv/pip-status; } |
        tee .venv/install.log |
        sed -un 's/^Collecting \([^ ><=;\[]*\).*/    \1/p; s/^\(Building\|Installing\) .*/    \1 …/p'
    if [ "$(cat .venv/pip-status)" != 0 ]; then
        tail -n 25 .venv/install.log
        stop "pip could not install Skep" "read what pip said above, then run this again"
    fi
    printf '%s %s' "$1" "$made_from" > $stamp
}
