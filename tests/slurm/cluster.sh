#!/usr/bin/env bash
# A throw-away Slurm cluster on loopback, for the tests: as root, without systemd.
#
#   cluster.sh up FOLDER [NODES=2]     start it (1 to 4 nodes); all of its state lies in FOLDER
#   cluster.sh down FOLDER             end every process of it
#
# Afterwards: export SLURM_CONF=FOLDER/slurm.conf.  Needs Debian's slurmctld, slurmd,
# slurm-client and munge.  The nodes n1, n2, ... are slurmd processes of this machine that claim
# 4 cores each; nothing is enforced.  The partition `cluster` has 16 nodes that claim 128
# cores, 2 TB and 8 GPUs each: `sbatch --test-only` judges large jobs by them.  Up in a few seconds.
set -euo pipefail

action=${1:?up or down}
folder=$(realpath -m "${2:?a folder}")
nodes=${3:-2}
case $nodes in
  [1-4]) ;;      # the ports after the fourth are the big nodes'
  *) echo "NODES $nodes: give 1 to 4" >&2; exit 2 ;;
esac
export SLURM_CONF=$folder/slurm.conf

write_configuration() {
  local host base
  host=$(hostname -s)
  base=$((15000 + $$ % 60 * 80))        # the controller's port, the nodes', then srun's
  while (: < "/dev/tcp/127.0.0.1/$base") 2> /dev/null; do    # another cluster's
    base=$((base + 80))
  done
  cat > "$SLURM_CONF" <<EOF
ClusterName=gatewright
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base
SrunPortRange=$((base + 21))-$((base + 79))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=5
SlurmdTimeout=15
BatchStartTimeout=60
MessageTimeout=30
InactiveLimit=0
MinJobAge=3600
MaxArraySize=1001
JobRequeue=1
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=$((base + 1))-$((base + nodes)) CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=16000 State=UNKNOWN
PartitionName=gpu Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
GresTypes=gpu
NodeName=big[1-16] NodeHostname=$host NodeAddr=127.0.0.1 Port=$((base + 5))-$((base + 20)) CPUs=128 Boards=1 SocketsPerBoard=2 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=2000000 Gres=gpu:8 State=UNKNOWN
PartitionName=cluster Nodes=big[1-16] MaxTime=INFINITE State=UP OverSubscribe=NO
EOF
  echo "CgroupAutomount=no" > "$folder/cgroup.conf"
  echo "NodeName=big[1-16] Name=gpu File=$folder/gpu[0-7]" > "$folder/gres.conf"
  local n
  for n in $(seq 0 7); do
    [ -e "$folder/gpu$n" ] || mknod "$folder/gpu$n" c 1 3    # Slurm wants device files: these are like /dev/null
  done
}

up() {
  mkdir -p "$folder/state"
  chmod 755 "$folder"
  write_configuration
  (umask 077; head -c 1024 /dev/urandom > "$folder/munge.key")
  munged --force --num-threads=1 --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
  slurmctld -f "$SLURM_CONF" -i -c
  local n
  for n in $(seq -f n%g "$nodes") $(seq -f big%g 16); do
    mkdir -p "$folder/spool-$n"
    slurmd -f "$SLURM_CONF" -N "$n"
  done
  for _ in $(seq 100); do
    [ "$(timeout 3 sinfo -h -N -o %T 2> /dev/null | grep -cx idle)" = $((nodes + 16)) ] && return 0
    sleep 0.2
  done
  echo "the cluster did not come up; see $folder/*.log" >&2
  return 1
}

# A stepd carries this cluster's spool folder in no argument, but it is a child of our slurmd.
# A pid file may be older than the process that has its number now: our daemons name the folder.
processes() {
  local pid
  for pid in $(cat "$folder"/slurmd-*.pid "$folder/slurmctld.pid" "$folder/munged.pid" 2> /dev/null); do
    grep -qaF "$folder/" "/proc/$pid/cmdline" 2> /dev/null || continue
    pgrep -P "$pid" || true
    echo "$pid"
  done
}

down() {
  local pids alive
  timeout 5 scancel --user=root 2> /dev/null || true
  for _ in $(seq 40); do
    [ -z "$(timeout 3 squeue -h 2> /dev/null)" ] && break
    sleep 0.25
  done
  pids=$(processes)
  [ -n "$pids" ] && kill $pids 2> /dev/null || true
  for _ in $(seq 20); do
    alive=""
    for pid in $pids; do kill -0 "$pid" 2> /dev/null && alive="$alive $pid"; done
    [ -z "$alive" ] && return 0
    sleep 0.25
  done
  kill -9 $alive 2> /dev/null || true    # a slurmd without controller ignores SIGTERM
}

"$action"
