#!/bin/bash
# Runs a command with the environment of CANN and of NNAL, which brings the attention operators.
set -e
source /usr/local/Ascend/ascend-toolkit/set_env.sh
source /usr/local/Ascend/nnal/atb/set_env.sh
exec "$@"
