#!/bin/sh
# Starts this pod's server, as the primary or as a replica of it. Its configuration is written anew at each start.
set -eu
. /scripts/primary.sh
self=$POD_NAME.valkey-peers
cat >/data/valkey.conf <<EOF
port 6379
dir /data
protected-mode no
save ""
appendonly no
maxmemory 384mb
maxmemory-policy volatile-lru
tcp-keepalive 30
replica-announce-ip $self
EOF
[ "$primary" = "$self" ] || echo "replicaof $primary 6379" >>/data/valkey.conf
exec valkey-server /data/valkey.conf
