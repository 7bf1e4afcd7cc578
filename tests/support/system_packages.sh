#!/usr/bin/env bash
# Installs the Debian/Ubuntu packages that set-up, tests and the demo need, and only those that are missing.
# Says what it installs; without root it uses sudo, and without either it names the command and goes on,
# so that what can run without them still runs.
set -euo pipefail

missing=()
need() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || missing+=("$2"); }
need sshd openssh-server
need ssh openssh-client
need nsenter util-linux
need pgrep procps
need ip iproute2
need chromium chromium
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)

[ ${#missing[@]} -eq 0 ] && exit 0
echo "system packages needed and missing: ${missing[*]}" >&2
command -v apt-get >/dev/null 2>&1 || { echo "no apt-get here: install them with this system's package manager" >&2; exit 0; }
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null 2>&1 || { echo "not root and no sudo: run 'apt-get install ${missing[*]}' as root" >&2; exit 0; }
  as_root=(sudo)
fi
echo "installing them with apt-get" >&2
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
