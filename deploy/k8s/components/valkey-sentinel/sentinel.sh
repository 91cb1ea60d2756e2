#!/bin/sh
# Starts this pod's Sentinel. Its id is the pod's, so that a new pod of the same name is not counted as one more.
set -eu
. /scripts/primary.sh
cat >/sentinel/sentinel.conf <<EOF
port 26379
dir /sentinel
protected-mode no
sentinel myid $(printf '%040d' "$((${POD_NAME##*-} + 1))")
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $POD_NAME.valkey-peers
sentinel monitor baton $primary 6379 2
sentinel down-after-milliseconds baton 5000
sentinel failover-timeout baton 30000
sentinel parallel-syncs baton 1
EOF
exec valkey-server /sentinel/sentinel.conf --sentinel
