#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the images of Dockerfile.cuda and Dockerfile.rocm, and check that both hold the
# same kernels. Prints one line for each image: name, image digest, kernel digest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<TXT
usage: scripts/build_images.sh [--only cuda|rocm] [--tool docker|podman|buildah]
         [--base IMAGE] [--name NAME] [--tag TAG] [--build-arg NAME=VALUE]...

  --only NAME      one image (default: both)
  --tool NAME      default: the first of docker, podman and buildah that works
  --base IMAGE     instead of the Dockerfile's, for every image that is built
  --name NAME      repository (default: portable-backend): NAME-cuda, NAME-rocm
  --tag TAG        default: the version in pyproject.toml
  --build-arg ARG  passed through, such as GPU_ARCHS=sm90; may be repeated

Exit codes: 0 done, 1 a build failed or the kernels differ, 2 usage.
TXT
}

wrong() { printf 'build_images: %s\n' "$1" >&2 && usage >&2 && exit 2; }
fail() { printf 'build_images: %s\n' "$@" >&2 && exit 1; }
say() { printf '[%4d s] %s\n' "$SECONDS" "$*" >&2; }

variants=(cuda rocm)
tool='' base='' name=portable-backend
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
tag=$version
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit ;;
    --only | --tool | --base | --name | --tag | --build-arg)
      [ $# -gt 1 ] || wrong "$1 needs a value"
      case $1 in
        --only) variants=("$2") ;;
        --tool) tool=$2 ;;
        --base) base=$2 ;;
        --name) name=$2 ;;
        --tag) tag=$2 ;;
        --build-arg) arguments+=(--build-arg "$2") ;;
      esac
      shift 2
      ;;
    *) wrong "unknown option $1" ;;
  esac
done
case ${variants[0]} in cuda | rocm) ;; *) wrong "--only must be cuda or rocm, got ${variants[0]}" ;; esac

works() {
  case $1 in
    docker | podman) "$1" info >/dev/null 2>&1 ;;
    buildah) "$1" version >/dev/null 2>&1 ;;
    *) wrong "--tool must be docker, podman or buildah, got $1" ;;
  esac
}
if [ -z "$tool" ]; then
  for tool in docker podman buildah ''; do
    [ -n "$tool" ] || fail "none of docker, podman and buildah works here; install one"
    ! works "$tool" || break
  done
elif ! works "$tool"; then
  fail "$tool does not work here: see \`$tool info\`"
fi

revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || revision+=-modified
arguments+=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
[ -z "$base" ] || arguments+=(--build-arg "BASE_IMAGE=$base")
case $base in
  '' | *@sha256:*) ;;
  *) say "--base $base is not pinned: by NAME:TAG@sha256:DIGEST each build gets the same" ;;
esac
# OCI's own format has no health check.
[ "$tool" = docker ] || arguments+=(--format docker)

image_digest() {
  case $tool in
    docker) docker image inspect --format '{{.Id}}' "$1" ;;
    podman) podman image inspect --format '{{.Digest}}' "$1" ;;
    buildah) buildah inspect --type image --format '{{.FromImageDigest}}' "$1" ;;
  esac
}

# One digest over those of all kernels, computed from what the image has installed.
kernel_digest() {
  local container code
  code='import hashlib, json
from portable_backend.warmup.digest import current_digests
data = json.dumps(current_digests(), sort_keys=True).encode()
print("sha256:" + hashlib.sha256(data).hexdigest())'
  case $tool in
    docker | podman)
      "$tool" run --rm --network none --entrypoint python3 "$1" -c "$code"
      ;;
    buildah)
      container=$(buildah from --pull=never "$1")
      buildah run "$container" -- python3 -c "$code" || code=
      buildah rm "$container" >/dev/null
      [ -n "$code" ]
      ;;
  esac
}

digests=()
for variant in "${variants[@]}"; do
  image=$name-$variant:$tag
  say "building $image with $tool"
  "$tool" build --file "Dockerfile.$variant" --tag "$image" "${arguments[@]}" . >&2 ||
    fail "$image was not built"
  digest=$(kernel_digest "$image") || fail "$image cannot compute its kernel digest"
  digests+=("$digest")
  printf '%s image %s kernels %s\n' "$image" "$(image_digest "$image")" "$digest"
done
[ "${digests[0]}" = "${digests[-1]}" ] ||
  fail "the images hold different kernels" "build both from the same checkout"
say "done"
