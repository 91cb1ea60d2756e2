"""Moving KV blocks between workers. One file a transport; the file's name is its registration.

Owns the choice between transports. Adding one is adding a file with a class `Transport` (see base.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory
from kvstore.transport.base import Transport, TransportError
from runtime import plugins


def available() -> list[str]:
    """The names of all transports, sorted."""
    return plugins.available(__name__)


def load(name: str) -> Transport:
    """The transport of that name. Raises ConfigError, naming those that exist, if there is none."""
    transport: Transport = plugins.load(__name__, name, "Transport")()
    return transport


def offers(names: Iterable[str], memory: BlockMemory, nonce: str = "") -> list[tuple[str, dict[str, str]]]:
    """What an owner offers of these transports, best first: (name, parameters) of each that can serve `memory`."""
    ranked = sorted((load(name) for name in names), key=lambda transport: transport.rank)
    made = ((transport.name, transport.offer(memory, nonce)) for transport in ranked)
    return [(name, parameters) for name, parameters in made if parameters is not None]


def choose(
    local_names: Iterable[str],
    offered: Sequence[tuple[str, Mapping[str, str]]],
    layout: KVLayout,
    nonce: str = "",
) -> tuple[Transport, Mapping[str, str]]:
    """The best transport that both sides have and this side can use, with the parameters to `connect`.

    `offered` is the owner's list, made for `nonce`. Raises TransportError if there is none.
    """
    local_names = set(local_names)
    common = [(load(name), parameters) for name, parameters in offered if name in local_names]
    for transport, parameters in sorted(common, key=lambda pair: pair[0].rank):
        if transport.usable(parameters, layout, nonce):
            return transport, parameters
    names = [name for name, _ in offered]
    raise TransportError(f"no usable transport: {sorted(local_names)} here, {names} offered by the owner")
