"""Moving KV blocks between workers. One file a transport; the file's name is its registration.

Owns the choice between transports. Adding one is adding a file with a class `Transport` (see base.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory
from kvstore.transport.base import Network, Reader, Transport, TransportError
from runtime import plugins

logger = logging.getLogger(__name__)


def available() -> list[str]:
    """The names of all transports, sorted."""
    return plugins.available(__name__)


def load(name: str) -> Transport:
    """The transport of that name. Raises ConfigError, naming those that exist, if there is none."""
    transport: Transport = plugins.load(__name__, name, "Transport")()
    return transport


def open_all(names: Iterable[str], memory: BlockMemory, network: Network) -> dict[str, Transport]:
    """The transports of these names, opened for one worker. Raises ConfigError if one is not there or cannot be had;
    then none is open."""
    opened: dict[str, Transport] = {}
    try:
        for name in names:
            transport = load(name)
            transport.open(memory, network)
            opened[name] = transport
    except BaseException:
        close_all(opened)
        raise
    return opened


def close_all(transports: Mapping[str, Transport]) -> None:
    """Ends what `open_all` began."""
    for transport in transports.values():
        transport.close()


def offers(
    transports: Mapping[str, Transport], memory: BlockMemory, nonce: str = ""
) -> list[tuple[str, dict[str, str]]]:
    """What an owner offers of these transports, best first: (name, parameters) of each that can serve `memory`."""
    ranked = sorted(transports.values(), key=lambda transport: transport.rank)
    made = ((transport.name, transport.offer(memory, nonce)) for transport in ranked)
    return [(name, parameters) for name, parameters in made if parameters is not None]


def choose(
    transports: Mapping[str, Transport],
    offered: Sequence[tuple[str, Mapping[str, str]]],
    layout: KVLayout,
    nonce: str = "",
) -> tuple[Transport, Reader]:
    """The best transport that both sides have and this side can connect, and the connection.

    `offered` is the owner's list, made for `nonce`. Raises TransportError, with the reasons, if there is none.
    """
    common = [(transports[name], parameters) for name, parameters in offered if name in transports]
    failures: list[str] = []
    for transport, parameters in sorted(common, key=lambda pair: pair[0].rank):
        try:
            return transport, transport.connect(parameters, layout, nonce)
        except TransportError as error:
            logger.info("%s is not used: %s", transport.name, error.message)
            failures.append(f"{transport.name}: {error.message}")
    names = [name for name, _ in offered]
    text = "; ".join([f"{sorted(transports)} here, {names} offered by the owner", *failures])
    raise TransportError(f"no usable transport: {text}")
