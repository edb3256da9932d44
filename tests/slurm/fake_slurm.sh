#!/usr/bin/env bash
# sbatch, squeue and scancel of a Slurm that is a folder: jobs/ID holds a job's state.
# Files in the folder make it fail: refuse (--test-only says it), refuse-N (the Nth job),
# refuse-scancel, refuse-signal; hook is run before a job gets its id.
cd "$FAKE_SLURM" || exit 1
refuse() {
  [ -e "$1" ] && { cat "$1" >&2; exit 1; }
}
case ${0##*/} in
  sbatch)
    array=""
    for word; do
      case $word in
        --test-only) refuse refuse; exit 0 ;;
        --array=*) array=${word#--array=} ;;
      esac
    done
    id=$(($(cat last 2> /dev/null || echo 0) + 1))
    refuse "refuse-$id"
    echo "$id" > last
    echo "$*" >> calls
    cut -d' ' -f6 "/proc/$$/stat" > session
    [ -e hook ] && . ./hook
    if [ -z "$array" ]; then echo PENDING > "jobs/$id"; fi
    for range in $(echo "${array%\%*}" | tr , ' '); do
      for index in $(seq "${range%-*}" "${range#*-}"); do echo PENDING > "jobs/${id}_$index"; done
    done
    echo "$id"
    ;;
  squeue)
    wanted=",${*: -1},"
    for file in jobs/*; do
      id=${file#jobs/}
      case $wanted in *",${id%_*},"*) [ -e "$file" ] && echo "$id|$(cat "$file")|None" ;; esac
    done
    ;;
  scancel)
    refuse refuse-scancel
    case "$*" in *--signal*) echo "$*" >> signalled; refuse refuse-signal; exit 0 ;; esac
    echo "$*" >> scancelled
    for id; do
      for file in jobs/"$id" jobs/"$id"_*; do
        [ -e "$file" ] && echo CANCELLED > "$file"
      done
    done
    ;;
esac
exit 0
