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
  tune | verify) [ -z "$file" ] || wrong "$step takes no file, got $file" ;;
esac
case $step in
  -h | --help) usage && exit ;;
  tune)
    [ -n "$model" ] && [ -n "$out" ] || wrong "tune needs --model and --out"
    # Before half an hour of tuning, not after.
    [ -d "$(dirname "$out")" ] || wrong "--out $out: there is no folder $(dirname "$out")"
    ;;
  bake | import) [ -f "$file" ] || wrong "$step needs a file made by tune, got '$file'" ;;
  verify) ;;
  *) wrong "unknown step $step" ;;
esac
[ "$step" != bake ] || [ -d "$layer" ] || wrong "--layer must be a folder, got $layer"
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
    amd-*)
      echo --device /dev/kfd --device /dev/dri
      # The groups by number, as on the host: the image's have others. Podman without
      # root cannot name them, but can keep those of its user.
      if [ "$tool" = podman ] && [ "$(id -u)" != 0 ]; then
        echo --group-add keep-groups
      else
        stat --format '--group-add %g' /dev/kfd /dev/dri/renderD* 2>/dev/null | sort -u ||
          true # the engine may run on another host
      fi
      ;;
  esac
}

# inside [OPTIONS OF RUN...] -- COMMAND...: in a container of the image. Files go in and
# out by stdin and stdout, since a folder that both sides may write depends on user
# namespaces and labels, and is not to be had where the engine runs on another host.
inside() {
  local options=()
  while [ "$1" != -- ]; do options+=("$1") && shift; done
  shift
  # With --init, a signal ends what runs.
  "$tool" run --rm --init --read-only --tmpfs /tmp:exec,mode=1777 "${options[@]}" \
    "$image" "$@"
}
# The user cache, and what reads it.
cache=(--volume "${volume:-portable-backend-cache}:/cache")
on_gpu() {
  local options=("${cache[@]}" --shm-size 8g)
  # shellcheck disable=SC2207
  options+=($(gpu))
  [ -z "${HF_TOKEN:-}" ] || options+=(--env HF_TOKEN)
  # Read where it lies, without the labels that SELinux wants.
  [ ! -d "$model" ] || options+=(--security-opt label=disable
    --volume "$(realpath "$model"):/model:ro")
  inside "${options[@]}" -- portable-backend "$@"
}

case $tool in
  docker | podman) ;;
  local) [ -z "$volume" ] || export PORTABLE_BACKEND_CACHE_DIR=$volume ;;
  *) wrong "--tool must be docker, podman or local, got $tool" ;;
esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
case $step-$tool in
  tune-local)
    portable-backend tune --model "$model" "${more[@]}"
    portable-backend cache export "$scratch/records.zip"
    ;;
  tune-*)
    seen=$model
    [ ! -d "$model" ] || seen=/model
    on_gpu tune --model "$seen" "${more[@]}"
    # shellcheck disable=SC2016
    inside "${cache[@]}" -- sh -euc '
      cd "$(mktemp -d)"
      portable-backend cache export records.zip >&2
      cat records.zip' >"$scratch/records.zip"
    ;;
  bake-*)
    # In a copy: nothing changes where the import fails.
    mkdir "$scratch/layer"
    cp -r "$layer/." "$scratch/layer"
    if [ "$tool" = local ]; then
      portable-backend cache import --cache-dir "$scratch/layer" "$file"
    else
      cp "$file" "$scratch/records.zip"
      # shellcheck disable=SC2016
      tar -cf - -C "$scratch" layer records.zip | inside --interactive -- sh -euc '
        cd "$(mktemp -d)"
        tar -xf - --no-same-owner
        portable-backend cache import --cache-dir layer records.zip >&2
        tar -cf - layer' >"$scratch/layer.tar"
      tar -xf "$scratch/layer.tar" -C "$scratch" --no-same-owner
    fi
    ;;
  import-local) portable-backend cache import "$file" ;;
  import-*)
    # shellcheck disable=SC2016
    inside --interactive "${cache[@]}" -- sh -euc '
      cd "$(mktemp -d)"
      cat >records.zip
      portable-backend cache import records.zip' <"$file"
    ;;
  verify-local) portable-backend cache verify ;;
  verify-*)
    # Only the user cache is verified: what the image brings goes there first.
    inside "${cache[@]}" -- portable-backend cache merge /opt/portable-backend/records
    on_gpu cache verify
    ;;
esac
case $step in
  tune) cp "$scratch/records.zip" "$out" && echo "$out" ;;
  bake)
    find "$scratch/layer" -name '*.lock' -delete
    cp -r "$scratch/layer/." "$layer"
    find "$layer" -name '*.json' | sort
    ;;
esac
