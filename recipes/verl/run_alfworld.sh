#!/usr/bin/env bash
# RSPO+GiGPO on ALFWorld, Qwen2.5-1.5B, on verl; one machine of 8 GPUs. Further arguments override settings:
#
#   ALFWORLD_DATA=... recipes/verl/run_alfworld.sh trainer.n_gpus_per_node=4 data.seed=200
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${ALFWORLD_DATA:?must name the folder of the games (docs/environments.md says how to get them)}"
exec python -m rspo.integrations.verl.main --config-dir "$PWD/recipes" "$@" +verl=rspo_alfworld_qwen2.5_1.5b
