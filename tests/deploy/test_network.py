"""Which pods may connect where: the design's arrows, in the policies as in the processes.

The processes are those of the manifests, started with the pods' own arguments and variables on this machine's loopback;
what they connect to while they serve is read from the kernel.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kustomize import pod_spec
from manifests import ROLES, ROOT, Variant, config_of, containers, variant

from baton import Client
from baton.metadata_server import READY_TEXT, find_binary, server_argv
from baton.topology import choose_ports

START_LIMIT_S = 60.0
Arrow = tuple[str, str, int | str]
"""From, to, port. A namespace stands for who is outside."""

PORTS: dict[str, int] = {"router": 50051, "prefill": 7001, "decode": 7002, "valkey": 6379}
METRICS_PORT = 9464
INSIDE = {
    ("router", "prefill"),
    ("router", "decode"),
    ("router", "valkey"),
    ("decode", "prefill"),
    ("decode", "valkey"),
    ("prefill", "valkey"),
}
"""Who calls whom, by the design: routers call workers, decode fetches from prefill, all keep records in Valkey."""
SELDOM = {("decode", "decode"), ("prefill", "decode")}
"""Also allowed: a drained worker's sessions go to another one, and prefill may take KV that decode lends."""
CLIENTS: Arrow = ("baton/client=true", "router", 50051)
FURTHER: dict[str, set[Arrow]] = {
    "otel-collector": {("router", "otel-collector", 4317)},
    "pod-monitor": {("kubernetes.io/metadata.name=monitoring", role, "metrics") for role in ROLES},
    "valkey-sentinel": {("valkey", "valkey", 6379), ("valkey", "valkey", 26379)},
}
"""What components add."""


def test_policies_are_the_design(deployed: Variant) -> None:
    """Each arrow inside is allowed at both its ends, and nothing else is, but name resolution."""
    added = set().union(*(arrows for component, arrows in FURTHER.items() if component in deployed.name))
    if "everything" in deployed.name:
        added = set().union(*FURTHER.values())
    expected = {(caller, called, PORTS[called]) for caller, called in INSIDE | SELDOM} | {CLIENTS} | added
    assert allowed(deployed, "ingress") == expected
    inside = {arrow for arrow in expected if "=" not in arrow[0]}
    assert allowed(deployed, "egress") == inside | {
        (name, "kubernetes.io/metadata.name=kube-system,k8s-app=kube-dns", 53) for name in deployed.workloads
    }


def test_nothing_is_open_by_default(deployed: Variant) -> None:
    """Every pod is under a policy of each direction that allows nothing, so that only what others add is open."""
    denies = [p for p in deployed.of("NetworkPolicy") if not p["spec"].keys() & {"ingress", "egress"}]
    assert [(p["spec"]["podSelector"], p["spec"]["policyTypes"]) for p in denies] == [({}, ["Ingress", "Egress"])]
    for policy in deployed.of("NetworkPolicy"):
        for direction in ("ingress", "egress"):
            for rule in policy["spec"].get(direction, []):
                assert rule["ports"] and rule.get("from", rule.get("to")), "an empty list would mean everything"


def allowed(deployed: Variant, direction: str) -> set[Arrow]:
    """The arrows that the policies of one direction allow, ends expanded to components."""
    found: set[Arrow] = set()
    for policy in deployed.of("NetworkPolicy"):
        here = deployed.selected(policy["spec"]["podSelector"])
        for rule in policy["spec"].get(direction, []):
            there = {name for peer in rule["from" if direction == "ingress" else "to"] for name in ends(deployed, peer)}
            for port in rule["ports"]:
                pairs = {(a, b) if direction == "egress" else (b, a) for a in here for b in there}
                found |= {(caller, called, port["port"]) for caller, called in pairs}
    return found


def ends(deployed: Variant, peer: dict[str, Any]) -> set[str]:
    """The components of a peer; one in other namespaces is named after its labels."""
    if "namespaceSelector" not in peer:
        return deployed.selected(peer["podSelector"])
    labels = {**peer["namespaceSelector"]["matchLabels"], **peer.get("podSelector", {}).get("matchLabels", {})}
    return {",".join(f"{key}={value}" for key, value in labels.items())}


@dataclass
class Local:
    """The pods of a variant as processes of this machine."""

    processes: dict[str, subprocess.Popen[bytes]]
    """By component."""
    ports: dict[str, int]
    """Where each listens."""
    folder: Path
    """What each says, by its name."""

    def connections(self) -> set[tuple[str, str]]:
        """Who is connected to whose port now."""
        names = {port: name for name, port in self.ports.items()}
        inodes = {name: socket_inodes(process.pid) for name, process in self.processes.items()}
        found = set()
        for remote_port, inode in established():
            callers = [name for name, owned in inodes.items() if inode in owned]
            if remote_port in names and callers:
                found.add((callers[0], names[remote_port]))
        return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """The cpu overlay's processes, over the tracer, with free ports in place of the pods' own."""
    deployed, folder = variant("overlays/cpu"), tmp_path_factory.mktemp("pods")
    names = (*PORTS, *(f"metrics of {role}" for role in sorted(ROLES)))
    ports = dict(zip(names, choose_ports(len(names)), strict=True))
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as stack:
        processes["valkey"] = valkey = subprocess.Popen(
            server_argv(find_binary(), ports["valkey"]), stdout=subprocess.PIPE
        )
        stack.callback(end, valkey)
        assert valkey.stdout is not None and any(READY_TEXT in line for line in valkey.stdout)
        for role in ("prefill", "decode", "router"):
            argv, environment = as_process(deployed, role, ports)
            # KV goes as between hosts.
            argv += ["--kv-transports=grpc"] if role != "router" else []
            with (folder / role).open("wb") as errors:
                processes[role] = subprocess.Popen(argv, env=environment, cwd=folder, stderr=errors)
            stack.callback(end, processes[role])
            probe = next(containers(deployed.workloads[role]))["readinessProbe"]["grpc"]
            assert probe["port"] == PORTS[role]
            wait_until_ready(ports[role], probe["service"])
        yield Local(processes, ports, folder)


def as_process(deployed: Variant, role: str, ports: dict[str, int]) -> tuple[list[str], dict[str, str]]:
    """A pod's command line and environment, with loopback and `ports` in place of the pod network's."""
    (container,) = containers(deployed.workloads[role])
    environment = deployed.environment(container) | {"POD_NAME": role, "POD_IP": "127.0.0.1"}
    environment |= {"BATON_MODEL": "tracer", "BATON_REDIS_URL": f"redis://127.0.0.1:{ports['valkey']}/0"}
    words = []
    for argument in container["args"]:
        for name in ("POD_NAME", "POD_IP"):
            argument = argument.replace(f"$({name})", environment[name])
        argument = argument.replace(str(METRICS_PORT), str(ports[f"metrics of {role}"]))
        words.append(argument.replace(str(PORTS[role]), str(ports[role])).replace("0.0.0.0", "127.0.0.1"))
    assert not any("$(" in word for word in words)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return [sys.executable, "-P", "-m", *words], inherited | environment | {"PYTHONPATH": str(ROOT)}


def wait_until_ready(port: int, service: str) -> None:
    """Asks as the kubelet's probe does, and on as long as it takes."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=START_LIMIT_S, wait_for_ready=True)
        assert any(report.status == health_pb2.HealthCheckResponse.SERVING for report in watch)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def socket_inodes(pid: int) -> set[str]:
    """Inodes of a process's open sockets."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def established() -> Iterator[tuple[int, str]]:
    """Remote port and inode of every TCP connection of this machine."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01":
                yield int(fields[2].rpartition(":")[2], 16), fields[9]


def test_processes_connect_as_the_policies_allow(local: Local) -> None:
    """Requests are served, KV moves over the network, and every arrow is used; no other connection stands."""
    with Client(f"127.0.0.1:{local.ports['router']}", timeout_s=30) as client:
        answers = [client.complete(prompt_token_ids=[7 + turn] * 40, max_tokens=8) for turn in range(4)]
    assert all(answer.finish.served_by.transport == "grpc" for answer in answers)
    assert local.connections() == INSIDE


def test_pods_show_what_scalers_ask_for(local: Local) -> None:
    """Each process answers at its metrics port, with the series of its role that KEDA's queries and endpoint pickers
    name."""
    queries = [
        trigger["metadata"]["query"]
        for scaler in variant("overlays/cpu pod-monitor keda").of("ScaledObject")
        for trigger in scaler["spec"]["triggers"]
    ]
    assert len(queries) == 3
    for role in sorted(ROLES):
        with urllib.request.urlopen(f"http://127.0.0.1:{local.ports[f'metrics of {role}']}/metrics") as answer:
            text = answer.read().decode()
        named = {
            name
            for query in queries
            if f'component="{role}"' in query
            for name in re.findall(r"[a-z]+[:_][a-z_]+(?={)", query)
        }
        pickers = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}
        assert named or role == "router"
        for name in named | pickers:
            assert re.search(rf"^{name}\{{.*\}} [0-9.e-]+$", text, re.MULTILINE), name


def test_pods_end_in_time(local: Local) -> None:
    """On SIGTERM each process ends well by itself, in less than its pod's grace; decode first, as in a roll."""
    deployed = variant("overlays/cpu")
    for role in ("decode", "prefill", "router"):
        local.processes[role].send_signal(signal.SIGTERM)
        grace_s = pod_spec(deployed.workloads[role])["terminationGracePeriodSeconds"]
        # One that does not end by itself says before that where it waits.
        code = local.processes[role].wait(grace_s - config_of(deployed, role).drain_timeout_s)
        assert code == 0, (local.folder / role).read_text()
