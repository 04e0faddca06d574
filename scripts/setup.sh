#!/bin/sh
# What the Makefile needs before there is a virtual environment, in plain POSIX sh.
#
#   setup.sh backend             the MLX backend for this machine: cpu, cuda13, or metal (macOS); else one sentence, exit 1
#   setup.sh python              the Python to build the environment with; else what to type, exit 1
#   setup.sh install VENV EXTRA  make VENV if need be, then install this checkout with EXTRA (lab or dev) and the backend
#   setup.sh frontend VENV       build the front end, with node from the Python registry if need be, and link it into VENV
#
# Environment: PYTHON and BACKEND override the two choices.
set -eu

say() { echo "mlxnb: $*"; }
refuse() {
    echo "mlxnb: $*" >&2
    exit 1
}

older_than() { # older_than 2.31 2.35
    [ "${1%%.*}" -lt "${2%%.*}" ] || { [ "${1%%.*}" -eq "${2%%.*}" ] && [ "$(minor_of "$1")" -lt "$(minor_of "$2")" ]; }
}
minor_of() {
    rest=${1#*.}
    echo "${rest%%.*}"
}

backend() {
    system=$(uname -s) machine=$(uname -m)
    case "$system/$machine" in
    Darwin/arm64)
        macos=$(sw_vers -productVersion)
        [ "${macos%%.*}" -ge 14 ] || refuse "MLX needs macOS 14 or newer and this is macOS $macos; please update macOS."
        echo metal
        ;;
    Darwin/*)
        if [ "$(sysctl -n hw.optional.arm64 2>/dev/null || echo 0)" = 1 ]; then
            refuse "This shell runs under Rosetta; open a native terminal (or type: arch -arm64 make) and try again."
        fi
        refuse "mlxnb runs on Macs with Apple silicon only: MLX has no build for Intel Macs."
        ;;
    Linux/x86_64 | Linux/aarch64) linux_backend ;;
    Linux/*) refuse "mlxnb runs on Linux on x86-64 and ARM64 only: MLX has no build for $machine." ;;
    MINGW* | MSYS* | CYGWIN*) refuse "mlxnb does not run on Windows itself; it runs in WSL 2 with Ubuntu 22.04 or newer." ;;
    *) refuse "mlxnb runs on Linux (glibc 2.35 or newer) and on macOS 14 or newer on Apple silicon, not on $system." ;;
    esac
}

linux_backend() {
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) ||
        refuse "MLX needs Linux with glibc 2.35 or newer and this system has another C library (Alpine's musl?)."
    libc=${libc##* }
    if older_than "$libc" 2.35; then
        refuse "MLX needs glibc 2.35 or newer (Ubuntu 22.04, Debian 12, Fedora 36, RHEL 10) and this system has glibc $libc."
    fi
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=""
    case "$driver" in
    [0-9]*)
        if older_than "${driver%%.*}.0" 580.0; then
            say "found an NVIDIA GPU, but CUDA 13 needs driver 580 or newer and this is $driver; using the CPU instead." >&2
            echo cpu
        else
            echo cuda13
        fi
        ;;
    *) echo cpu ;;
    esac
}

# Every python3.x on PATH is tried by running it: a pyenv shim of a version that is not chosen exists, but only prints an error.
find_python() {
    lacking=""
    for name in python3.14 python3.13 python3.12 python3.11 python3; do
        for candidate in $(on_path "$name"); do
            version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))' 2>/dev/null) ||
                continue
            if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
                echo "$candidate"
                return
            fi
            lacking=${lacking:-$version}
        done
    done
    [ -n "$lacking" ] || refuse "No Python 3.11 or newer was found on PATH; install one, or type: make PYTHON=/path/to/python3"
    if command -v apt-get >/dev/null 2>&1; then
        refuse "Python $lacking has no venv module here; type: sudo apt-get install -y python$lacking-venv"
    fi
    refuse "Python $lacking has no venv and ensurepip modules; install your system's package for them, or type: make PYTHON=/path/to/python3"
}

on_path() {
    saved=$IFS
    IFS=:
    for folder in $PATH; do
        if [ -x "$folder/$1" ] && [ ! -d "$folder/$1" ]; then echo "$folder/$1"; fi
    done
    IFS=$saved
}

install() {
    venv=$1 extra=$2
    chosen=${BACKEND:-}
    [ -n "$chosen" ] || chosen=$(backend)
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=${PYTHON:-}
        [ -n "$python" ] || python=$(find_python)
        say "making $venv with $("$python" --version) ($python)"
        "$python" -m venv "$venv"
    fi
    drop_other_backend "$venv" "$chosen"
    case "$chosen" in
    cpu)
        say "backend: CPU"
        if [ "$(uname -m)" = x86_64 ]; then
            say "it comes with Intel MKL, which makes it several times faster: about 280 MB to download, 0.95 GB on disk"
        fi
        extras="$extra,cpu"
        ;;
    cuda13)
        say "backend: CUDA 13, with NVIDIA's libraries: about 2.1 GB to download"
        extras="$extra,cuda13"
        ;;
    metal)
        say "backend: Metal"
        extras="$extra"
        ;;
    *) refuse "BACKEND=$chosen is none of cpu, cuda13, metal." ;;
    esac
    say "installing this checkout and what it needs into $venv (extras: $extras); the first time takes minutes"
    quiet=--quiet
    if [ -t 1 ]; then quiet=""; fi # pip draws its progress bars on a terminal only
    # Without the front end, and so without node: `frontend` builds it, for the targets that show it.
    MLXNB_NO_FRONTEND=1 "$venv/bin/python" -m pip install $quiet --disable-pip-version-check --editable ".[$extras]" ||
        refuse "The installation failed; pip's message is above. Nothing outside $venv was changed: put it right and type make again."
}

frontend() {
    venv=$1
    needs=$("$venv/bin/python" scripts/frontend.py require)
    if [ -n "$needs" ]; then
        say "the front end is built with node, and there is none here that is new enough: installing $needs into $venv (about 60 MB)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$needs" ||
            refuse "It could not be installed; pip's message is above. With node 20 or newer and npm on the PATH it is not needed."
    fi
    "$venv/bin/python" scripts/frontend.py build || refuse "The front end could not be built; the message is above."
    "$venv/bin/python" scripts/frontend.py link "$venv"
}

# mlx-cpu and mlx-cuda-13 install the same libmlx.so, so that the later one wins and removing one breaks the other.
drop_other_backend() {
    installed=$("$1/bin/python" -m pip list --format=freeze --disable-pip-version-check 2>/dev/null | sed -n 's/^\(mlx-c[a-z0-9-]*\)==.*/\1/p')
    case "$2" in
    cpu) wanted=mlx-cpu ;;
    cuda13) wanted=mlx-cuda-13 ;;
    *) return 0 ;;
    esac
    for name in $installed; do
        if [ "$name" != "$wanted" ]; then
            say "removing the other MLX backend ($name): two in one environment overwrite each other"
            # shellcheck disable=SC2086
            "$1/bin/python" -m pip uninstall --quiet --yes $installed
            return 0
        fi
    done
}

case "${1:-}" in
backend) backend ;;
python) find_python ;;
install) install "$2" "$3" ;;
frontend) frontend "$2" ;;
*) refuse "usage: setup.sh backend | python | install VENV EXTRA | frontend VENV" ;;
esac
