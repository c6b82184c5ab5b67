#!/usr/bin/env bash
# A training on the machines of a Slurm job: one Ray cluster for its time, the command on the first machine.
#
#   sbatch --nodes=4 scripts/cluster/slurm.sh spear train preset=… cluster=4x8gpu --out /shared/runs/NAME
#
# Each machine needs the same installation at the same path, and the folder of --out. A job that is started again with the
# same command resumes the run.
#SBATCH --job-name=spear
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=TERM@120
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "name the command, such as: sbatch $0 spear train …" >&2
    exit 2
fi
port=${RAY_PORT:-6379}
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${machines[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | tr ' ' '\n' | grep -m1 -v '^127\.\|:' || echo 127.0.0.1)
export RAY_ADDRESS=$address:$port

nodes=()
stop() {
    if [[ ${#nodes[@]} -gt 0 ]]; then
        kill "${nodes[@]}" 2>/dev/null || true
        wait "${nodes[@]}" 2>/dev/null || true
    fi
}
trap stop EXIT
trap 'exit 143' TERM INT
check() { # that every machine still runs Ray
    local node
    for node in "${nodes[@]}"; do
        kill -0 "$node"
    done
}

# shellcheck disable=SC2086  # RAY_OPTIONS holds several words
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port="$port" --block ${RAY_OPTIONS:-} &
nodes+=("$!")
until ray status --address="$RAY_ADDRESS" >/dev/null 2>&1; do
    check
    sleep 2
done
for machine in "${machines[@]:1}"; do
    # shellcheck disable=SC2086
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$machine" \
        ray start --address="$RAY_ADDRESS" --block ${RAY_OPTIONS:-} &
    nodes+=("$!")
done
until [[ $(ray status --address="$RAY_ADDRESS" | sed -n '/^Active:/,/^Pending:/p' | grep -c ' node_') -ge ${#machines[@]} ]]; do
    check
    sleep 2
done
"$@"
