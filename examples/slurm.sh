#!/bin/bash
# Train on several machines of a Slurm cluster: sbatch examples/slurm.sh train.py
# One task on each node runs a torchrun agent, which starts a rank for each GPU. Program and checkpoints lie in a folder that
# all nodes see. After a failure the agents start the ranks again; after the job, submit it again: both go on from the newest
# checkpoint, if the program looks for one (docs/howto/several-machines.md).

#SBATCH --job-name=penstock
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --requeue

set -euo pipefail

ranks_per_node=${SLURM_GPUS_ON_NODE:-4} # without GPUs, any number: 4
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # another for every job, since jobs may share a node

source .venv/bin/activate
export OMP_NUM_THREADS=1

# SLURM_NODEID is the number of the node, which only the task on it knows: hence the single quotes.
# shellcheck disable=SC2016
srun bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$0" \
    --master-addr "$1" --master-port "$2" --max-restarts 3 "${@:3}"' "$ranks_per_node" "$head_node" "$port" "$@"
