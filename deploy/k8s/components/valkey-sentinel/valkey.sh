#!/bin/sh
# Starts this pod's server, as the primary or as a replica of it. Its configuration is written anew at each start.
set -eu
. /scripts/primary.sh
self=$POD_NAME.valkey-peers
# Whom the Sentinels still call the primary has just lost all it held: replicas would copy that. They promote one of
# them in a few seconds; if there is none, this is the primary after all.
patience=15
while [ "$told" = yes ] && [ "$primary" = "$self" ] && [ "$patience" -gt 0 ]; do
  sleep 1
  patience=$((patience - 1))
  . /scripts/primary.sh
done
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
