#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tune on one node of a kind, carry the records to the others, check them there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<TXT
usage: scripts/fleet.sh tune --model DIR_OR_ID --out FILE.zip [OPTIONS] [-- TUNE OPTIONS]
       scripts/fleet.sh bake FILE.zip [OPTIONS]     into deploy/records: build images next
       scripts/fleet.sh import FILE.zip [OPTIONS]   into the volume of this node
       scripts/fleet.sh verify [OPTIONS]            check and measure again on this GPU

  --image IMAGE      default: portable-backend-cuda:VERSION, or -rocm for amd
  --device NAME      nvidia or amd (default: amd where /dev/kfd is)
  --tool NAME        docker, podman, or local: portable-backend on PATH, no container
                     (default: docker)
  --volume NAME      the volume, or folder, of the user cache
                     (default: portable-backend-cache; local: the usual user cache)
  --layer DIR        where bake puts records (default: deploy/records)
TXT
}
wrong() { printf 'fleet: %s\n' "$1" >&2 && usage >&2 && exit 2; }

[ $# -gt 0 ] || wrong "name a step"
step=$1 && shift
image='' device='' tool=docker volume='' layer=$root/deploy/records model='' out='' file=''
more=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit ;;
    --) shift && more=("$@") && break ;;
    --image | --device | --tool | --volume | --layer | --model | --out)
      [ $# -gt 1 ] || wrong "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    -*) wrong "unknown option $1" ;;
    *) [ -z "$file" ] || wrong "one file at a time, got $file and $1" && file=$1 && shift ;;
  esac
done
[ ${#more[@]} = 0 ] || [ "$step" = tune ] || wrong "only tune takes options after --"
case $step in
  -h | --help) usage && exit ;;
  tune) [ -n "$model" ] && [ -n "$out" ] || wrong "tune needs --model and --out" ;;
  bake | import) [ -f "$file" ] || wrong "$step needs a file made by tune, got '$file'" ;;
  verify) ;;
  *) wrong "unknown step $step" ;;
esac
[ -n "$device" ] || { [ -e /dev/kfd ] && device=amd || device=nvidia; }
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
case $device in
  nvidia) image=${image:-portable-backend-cuda:$version} ;;
  amd) image=${image:-portable-backend-rocm:$version} ;;
  *) wrong "--device must be nvidia or amd, got $device" ;;
esac

gpu() {
  case $device-$tool in
    nvidia-docker) echo --gpus all ;;
    nvidia-podman) echo --device nvidia.com/gpu=all ;;
    amd-*) # The groups by number, as on the host: the image's have others.
      echo --device /dev/kfd --device /dev/dri
      stat --format '--group-add %g' /dev/kfd /dev/dri/renderD* 2>/dev/null | sort -u
      ;;
  esac
}

# portable NEEDS_GPU FOLDER ARGS...: the command, with FOLDER seen as /shared.
portable() {
  local needs_gpu=$1 folder=$2 options=()
  shift 2
  if [ "$tool" = local ]; then
    [ -z "$volume" ] || export PORTABLE_BACKEND_CACHE_DIR=$volume
    portable-backend "${@//\/shared/$folder}"
    return
  fi
  # shellcheck disable=SC2207
  [ "$needs_gpu" = no ] || options=($(gpu))
  [ -z "${HF_TOKEN:-}" ] || options+=(--env HF_TOKEN)
  [ ! -d "$model" ] || options+=(--volume "$(realpath "$model"):/model:ro")
  # As this user, so that what it writes to FOLDER is the user's.
  [ "$step" != bake ] || options+=(--user "$(id -u):0" --env HOME=/tmp)
  [ "$step" = bake ] || options+=(--volume "${volume:-portable-backend-cache}:/cache")
  "$tool" run --rm --read-only --tmpfs /tmp:exec,mode=1777 --shm-size 8g \
    --volume "$folder:/shared" "${options[@]}" "$image" portable-backend "$@"
}

case $tool in docker | podman | local) ;; *) wrong "--tool must be docker, podman or local, got $tool" ;; esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 777 "$scratch" # the image's user writes here
case $step in
  tune)
    seen=$model
    [ "$tool" = local ] || [ ! -d "$model" ] || seen=/model
    portable yes "$scratch" tune --model "$seen" "${more[@]}"
    portable no "$scratch" cache export /shared/records.zip
    cp "$scratch/records.zip" "$out"
    echo "$out"
    ;;
  bake)
    mkdir -p "$scratch/layer"
    cp -r "$layer/." "$scratch/layer"
    cp "$file" "$scratch/records.zip"
    portable no "$scratch" cache import --cache-dir /shared/layer /shared/records.zip
    find "$scratch/layer" -name '*.lock' -delete
    cp -r "$scratch/layer/." "$layer"
    find "$layer" -name '*.json' | sort
    ;;
  import)
    cp "$file" "$scratch/records.zip"
    chmod 644 "$scratch/records.zip"
    portable no "$scratch" cache import /shared/records.zip
    ;;
  verify)
    # Only the user cache is verified: what the image brings goes there first.
    [ "$tool" = local ] || portable no "$scratch" cache merge /opt/portable-backend/records
    portable yes "$scratch" cache verify
    ;;
esac
