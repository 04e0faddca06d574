#!/bin/sh
# A Chromium for the browser tests, in plain POSIX sh. Prints the path of one that runs, on stdout; all else goes to stderr.
#
#   chromium.sh find           one that is here: $CHROMIUM, on the PATH, in the usual places, or Playwright's; else exit 1
#   chromium.sh get [--yes]    the same, else fetch one, asking first unless --yes: Playwright's headless shell into the
#                              user's cache, else (root on Debian and its relatives) the distribution's package;
#                              else one line to type, exit 1
#
# Environment: CHROMIUM is an executable to use and nothing else. PYTHON is one with the package playwright.
set -eu

say() { echo "mlxnb: $*" >&2; }
refuse() {
    say "$*"
    exit 1
}

# Ubuntu's chromium-browser may be a stub that only tells how to install a snap: it is tried by running it.
runs() { [ -n "$1" ] && [ -x "$1" ] && [ ! -d "$1" ] && "$1" --version >/dev/null 2>&1; }

candidates() {
    for name in chromium google-chrome google-chrome-stable chromium-browser chrome microsoft-edge; do
        command -v "$name" 2>/dev/null || true
    done
    echo /usr/lib/chromium/chromium
    echo /opt/google/chrome/chrome
    echo "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    echo "/Applications/Chromium.app/Contents/MacOS/Chromium"
    echo "${HOME:-/nonexistent}/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    for folder in "${PLAYWRIGHT_BROWSERS_PATH:-}" "${HOME:-/nonexistent}/.cache/ms-playwright" "${HOME:-/nonexistent}/Library/Caches/ms-playwright"; do
        [ -n "$folder" ] || continue
        ls -d "$folder"/chromium_headless_shell-*/*/headless_shell "$folder"/chromium_headless_shell-*/*/chrome-headless-shell 2>/dev/null || true
    done
}

find_one() {
    if [ -n "${CHROMIUM:-}" ]; then
        runs "$CHROMIUM" || refuse "CHROMIUM=$CHROMIUM does not run; unset it, or name another."
        echo "$CHROMIUM"
        return 0
    fi
    candidates | while IFS= read -r candidate; do
        if runs "$candidate"; then
            echo "$candidate"
            break
        fi
    done | grep . # its status says whether there was one
}

agreed() { # agreed WHAT
    [ "$yes" = 1 ] && return 0
    if [ ! -t 0 ] || [ ! -t 2 ]; then
        return 1
    fi
    printf 'mlxnb: %s? [y/N] ' "$1" >&2
    read -r reply || reply=""
    case "$reply" in y | Y | yes) return 0 ;; *) return 1 ;; esac
}

fetch_shell() {
    python=${PYTHON:-python3}
    "$python" -c 'import playwright' 2>/dev/null || return 1
    agreed "The browser tests need Chromium. Fetch Playwright's headless shell (about 110 MB) into your cache folder" || return 1
    say "fetching Playwright's headless shell"
    PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT=${PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT:-15000} \
        "$python" -m playwright install --only-shell chromium >&2 2>/dev/null || {
        say "that could not be fetched"
        return 1
    }
}

debian_root() { [ "$(id -u)" = 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null 2>&1; }

install_package() {
    debian_root || return 1
    agreed "Install the distribution's package chromium with apt-get" || return 1
    say "installing the package chromium"
    apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >&2
}

what_to_type() {
    case "$(uname -s)" in
    Darwin) echo "${PYTHON:-python3} -m playwright install --only-shell chromium" ;;
    *)
        if [ -e /etc/debian_version ]; then
            if [ "$(id -u)" = 0 ]; then echo "apt-get update && apt-get install -y chromium"; else echo "sudo apt-get install -y chromium"; fi
        elif command -v dnf >/dev/null 2>&1; then
            echo "sudo dnf install -y chromium"
        elif command -v pacman >/dev/null 2>&1; then
            echo "sudo pacman -S chromium"
        else
            echo "${PYTHON:-python3} -m playwright install --only-shell chromium"
        fi
        ;;
    esac
}

yes=0
[ "${2:-}" != --yes ] || yes=1
case "${1:-}" in
find) find_one || refuse "The browser tests need Chromium or Chrome, and there is none here; type: $(what_to_type)" ;;
get)
    find_one && exit 0
    if fetch_shell && find_one; then exit 0; fi
    if install_package && find_one; then exit 0; fi
    refuse "The browser tests need Chromium or Chrome; type: $(what_to_type)"
    ;;
*) refuse "usage: chromium.sh find | get [--yes]" ;;
esac
