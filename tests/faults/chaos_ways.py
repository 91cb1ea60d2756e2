"""The ways between the workers of a chaos run and everybody else. Each can be cut: nothing passes, and nobody is told.

`Namespaces` gives every worker a network of its own and pulls its cable (Linux, as root, in a process that
`in_own_network` has started); `Proxies` puts a TCP proxy before each worker, which works everywhere. Packets are lost
in the first and held back in the second; to those who wait for them it is the same.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from wire import Wire

from baton.topology import choose_ports

OWN_NETWORK = "BATON_CHAOS_OWN_NETWORK"
"""Set in the environment of a process that `in_own_network` has started."""
_PREPARE = 'mkdir -p /run/netns && mount -t tmpfs none /run/netns && ip link set lo up && exec "$@"'


class Ways(ABC):
    """Between the workers and all others."""

    hub = "127.0.0.1"
    """Where Redis and the routers listen."""

    @abstractmethod
    async def open(self) -> None:
        """Makes what all ways need, `hub` among it."""

    @abstractmethod
    async def lead_to(self, name: str) -> tuple[str, int, str]:
        """Makes a way to a worker: host and port where it must listen, and the address where others find it."""

    @abstractmethod
    def command_line(self, name: str, argv: Sequence[str]) -> tuple[str, ...]:
        """How the worker is started so that this is its only way."""

    @abstractmethod
    async def cut(self, name: str) -> None:
        """Nothing passes to and from a worker."""

    @abstractmethod
    async def mend(self, name: str) -> None:
        """Undoes `cut`."""

    @abstractmethod
    async def close(self) -> None:
        """Takes everything down."""


class Proxies(Ways):
    """A proxy before each worker."""

    def __init__(self) -> None:
        self._wires: dict[str, Wire] = {}

    async def open(self) -> None:
        pass

    async def lead_to(self, name: str) -> tuple[str, int, str]:
        (port,) = choose_ports(1)
        wire = self._wires[name] = Wire(f"127.0.0.1:{port}")
        await wire.start()
        return "127.0.0.1", port, wire.address

    def command_line(self, name: str, argv: Sequence[str]) -> tuple[str, ...]:
        return tuple(argv)

    async def cut(self, name: str) -> None:
        self._wires[name].freeze()

    async def mend(self, name: str) -> None:
        self._wires[name].thaw()

    async def close(self) -> None:
        for wire in self._wires.values():
            await wire.stop()


class Namespaces(Ways):
    """A network for each worker, joined by a bridge."""

    hub = "10.77.0.1"

    def __init__(self) -> None:
        self._hosts: dict[str, str] = {}

    async def open(self) -> None:
        await _ip("link add hub type bridge")
        await _ip(f"addr add {self.hub}/24 dev hub")
        await _ip("link set hub up")

    async def lead_to(self, name: str) -> tuple[str, int, str]:
        host = self._hosts[name] = f"10.77.0.{len(self._hosts) + 10}"
        await _ip(f"netns add {name}")
        await _ip(f"link add to-{name} type veth peer name eth0 netns {name}")
        await _ip(f"link set to-{name} master hub up")
        for command in ("link set lo up", f"addr add {host}/24 dev eth0", "link set eth0 up"):
            await _ip(f"-n {name} {command}")
        return host, 7000, f"{host}:7000"

    def command_line(self, name: str, argv: Sequence[str]) -> tuple[str, ...]:
        return ("ip", "netns", "exec", name, *argv)

    async def cut(self, name: str) -> None:
        await _ip(f"link set to-{name} down")

    async def mend(self, name: str) -> None:
        await _ip(f"link set to-{name} up")

    async def part(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            await _ip(f"-n {here} route add blackhole {self._hosts[there]}")

    async def join(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            await _ip(f"-n {here} route del blackhole {self._hosts[there]}")

    async def close(self) -> None:
        """Ends with the process that was started for it."""


def may_have_own_network() -> bool:
    """Whether this system lets us make networks."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    tried = ["unshare", "--net", "--mount", "sh", "-c", _PREPARE, "sh", "ip", "link", "add", "x", "type", "bridge"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


def in_own_network() -> None:
    """Goes on as the same program in a network of its own, if it is not in one; whatever is made there ends with it."""
    if OWN_NETWORK not in os.environ:
        line = ["unshare", "--net", "--mount", "sh", "-c", _PREPARE, "sh", *sys.orig_argv]
        os.execvpe(line[0], line, {**os.environ, OWN_NETWORK: "1"})


async def _ip(arguments: str) -> None:
    process = await asyncio.create_subprocess_exec("ip", *arguments.split(), stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 0, f"ip {arguments}: {errors.decode()}"
