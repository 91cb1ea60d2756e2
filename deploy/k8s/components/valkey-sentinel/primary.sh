# Sets `primary` to the host that the Sentinels call the primary, and `told` to whether one did; where none answers it is
# the first pod.
primary=valkey-0.valkey-peers
told=no
for peer in valkey-0 valkey-1 valkey-2; do
  answer=$(timeout 2 valkey-cli -h "$peer.valkey-peers" -p 26379 sentinel get-master-addr-by-name baton 2>/dev/null) || continue
  host=$(printf '%s\n' "$answer" | head -n 1)
  case "$host" in
    *.valkey-peers)
      primary=$host
      told=yes
      break
      ;;
  esac
done
