"""What every pod must be: probed, drained in time, confined, bounded, found by its Services, and configured with
options that exist."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from kustomize import pod_spec
from manifests import ROLES, ROOT, Variant, config_of, containers, loaded, matches, num_bytes, pod_labels, variant

from engine.config import WorkerConfig
from router.config import RouterConfig
from runtime.errors import ConfigError

AFTER_DRAIN_S = 10
"""What a process may take beyond its drain: the last calls, spans, unregistering."""
SERVICES = {"router": "Inference", "prefill": "Prefill", "decode": "Decode"}
OVERHEAD_BYTES = 1280 * 2**20
"""A worker with the packaged model in float32, measured, without its KV pool."""


def test_options_exist(deployed: Variant) -> None:
    """Each process of ours starts with the arguments and variables that its pod gives it, and reads all of them."""
    for role in ROLES:
        config = config_of(deployed, role)
        assert config.host == "0.0.0.0", "others cannot reach what listens on loopback"
        assert config.redis_url == "redis://valkey:6379/0"
        assert config.model == config_of(deployed, "router").model
        if isinstance(config, WorkerConfig):
            (container,) = containers(deployed.workloads[role])
            environment = {variable["name"] for variable in container["env"]}
            assert config.worker_id == "$(POD_NAME)" and environment >= {"POD_NAME", "POD_IP"}
            assert config.advertise_address == f"$(POD_IP):{config.port}"
    worker_models = {config_of(deployed, role).kv_block_size for role in ("prefill", "decode")}  # type: ignore[union-attr]
    assert len(worker_models) == 1, "routers pair only workers of one KV layout"


@pytest.mark.parametrize("wrong", [["router", "--prot=1"], ["decode_svc", "--chunk-size=0"], ["router", "--port=x"]])
def test_wrong_options_are_found(wrong: list[str]) -> None:
    with pytest.raises(ConfigError):
        loaded([*wrong, "--model=tracer"], {}, prog="test")
    with pytest.raises(AssertionError, match="BATON_CHUNK_SIZE"):
        loaded(["router", "--model=tracer"], {"BATON_CHUNK_SIZE": "64"}, prog="test")


def test_probes(deployed: Variant) -> None:
    """Startup, readiness and liveness; ours by gRPC on the port they listen on, and only readiness asks for more than
    the process itself: no probe of life depends on other processes."""
    for name, workload in deployed.workloads.items():
        for container in containers(workload):
            assert {"readinessProbe", "livenessProbe"} <= container.keys()
            if name not in ROLES:
                continue
            port = config_of(deployed, name).port
            service = f"baton.v1.{SERVICES[name]}"
            expected = {
                "startupProbe": "" if name == "router" else service,
                "readinessProbe": service,
                "livenessProbe": "",
            }
            for probe, asked in expected.items():
                assert container[probe]["grpc"] == {"port": port, "service": asked}
            startup, liveness = container["startupProbe"], container["livenessProbe"]
            minutes = 2 if name == "router" else 30
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 60 * minutes
            assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60, "a stall is not death"


def test_grace(deployed: Variant) -> None:
    """A pod gets the time of its preStop, its drain and what follows; the router's preStop outlasts endpoints."""
    for name, workload in deployed.workloads.items():
        spec = pod_spec(workload)
        if name in ROLES:
            (container,) = containers(workload)
            before_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            assert (before_s >= 10) == (name == "router"), "only the router is reached through endpoints"
            needed_s = before_s + config_of(deployed, name).drain_timeout_s + AFTER_DRAIN_S
            assert spec["terminationGracePeriodSeconds"] >= needed_s, name
        else:
            assert spec["terminationGracePeriodSeconds"] >= AFTER_DRAIN_S


def test_restricted(deployed: Variant) -> None:
    """Pods pass the restricted profile, which the namespace enforces; where the driver lies on the host, its folders
    are the only exception, read-only, and the namespace says so."""
    (namespace,) = deployed.of("Namespace")
    enforced = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    host_paths: list[str] = []
    for workload in deployed.workloads.values():
        spec = pod_spec(workload)
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(workload):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context
            assert not any("hostPort" in port for port in container["ports"])
        for volume in spec.get("volumes", []):
            (kind,) = volume.keys() - {"name"}
            if kind == "hostPath":
                host_paths.append(volume["hostPath"]["path"])
                mounts = [m for c in containers(workload) for m in c["volumeMounts"] if m["name"] == volume["name"]]
                assert mounts and all(mount["readOnly"] for mount in mounts)
            else:
                assert kind in {"configMap", "emptyDir", "persistentVolumeClaim"}
    assert bool(host_paths) == (enforced == "privileged") == ("ascend-host-driver" in deployed.name)
    assert enforced in {"restricted", "privileged"}


def test_no_api_tokens(deployed: Variant) -> None:
    """Nobody talks to the Kubernetes API, and nobody gets Services as variables: BATON_PORT would be an option."""
    assert all(account["automountServiceAccountToken"] is False for account in deployed.of("ServiceAccount"))
    accounts = [pod_spec(workload)["serviceAccountName"] for workload in deployed.workloads.values()]
    assert len(set(accounts)) == len(accounts)
    for workload in deployed.workloads.values():
        assert pod_spec(workload)["automountServiceAccountToken"] is False
        assert pod_spec(workload)["enableServiceLinks"] is False


def test_resources(deployed: Variant) -> None:
    """Requests and limits of CPU and memory everywhere, memory equally; workers' device in both; bounded volumes."""
    for workload in deployed.workloads.values():
        for container in containers(workload):
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert requests.keys() == limits.keys() >= {"cpu", "memory"}
            assert requests["memory"] == limits["memory"], "memory cannot be taken back"
            devices = requests.keys() - {"cpu", "memory"}
            is_worker = pod_labels(workload)["app.kubernetes.io/component"] in {"prefill", "decode"}
            assert devices == ({"huawei.com/Ascend910"} if is_worker and "ascend" in deployed.name else set())
            assert all(requests[device] == limits[device] == "1" for device in devices)
        for volume in pod_spec(workload).get("volumes", []):
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]


def test_shared_memory(deployed: Variant) -> None:
    """The KV pool lies in /dev/shm, which is as large as the pool may become, within what the container may take."""
    for role in ("prefill", "decode"):
        config = config_of(deployed, role)
        assert isinstance(config, WorkerConfig)
        (container,) = containers(deployed.workloads[role])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod_spec(deployed.workloads[role])["volumes"]}
        directory = volumes[mounts[str(config.shared_memory_dir)]]["emptyDir"]
        assert directory["medium"] == "Memory"
        limit_bytes = num_bytes(container["resources"]["limits"]["memory"])
        assert num_bytes(directory["sizeLimit"]) >= config.kv_cache_gpu_mem_utilization * limit_bytes
        assert num_bytes(directory["sizeLimit"]) <= limit_bytes - OVERHEAD_BYTES
        assert "emptyDir" in volumes[mounts["/tmp"]], "the root is read-only, and kernels are compiled to here"


def test_valkey_fits_its_memory(deployed: Variant) -> None:
    """What Valkey may hold leaves room for its buffers."""
    container = next(each for each in containers(deployed.workloads["valkey"]) if each["name"] == "valkey")
    settings = " ".join(container.get("args", []))
    settings += " ".join(text for each in deployed.of("ConfigMap") for text in each["data"].values())
    (size,) = set(re.findall(r"maxmemory (\d+)mb", settings))
    assert int(size) * 2**20 <= 0.75 * num_bytes(container["resources"]["limits"]["memory"])


def test_selectors(deployed: Variant) -> None:
    """Each selector picks the pods of its own workload and no others; Services and budgets pick one component."""
    for name, workload in deployed.workloads.items():
        assert deployed.selected(workload["spec"]["selector"]) == {name}
        for spread in pod_spec(workload).get("topologySpreadConstraints", []):
            assert deployed.selected(spread["labelSelector"]) == {name}
        if name in ROLES:
            assert pod_spec(workload)["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    for service in deployed.of("Service"):
        assert len(deployed.selected({"matchLabels": service["spec"]["selector"]})) == 1
    budgets = [deployed.selected(budget["spec"]["selector"]) for budget in deployed.of("PodDisruptionBudget")]
    assert all(len(budget) == 1 for budget in budgets)
    assert set.union(*budgets) >= ROLES, "a node is emptied one worker of a pool at a time"
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in deployed.of("PodDisruptionBudget"))


def test_ports(deployed: Variant) -> None:
    """A pod declares the port it listens on, Services lead to declared ports, and addresses in options to Services."""
    for role in ROLES:
        assert declared_ports(deployed, role)["grpc"] == config_of(deployed, role).port
    addresses: dict[str, set[int]] = {}
    for service in deployed.of("Service"):
        (component,) = deployed.selected({"matchLabels": service["spec"]["selector"]})
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in declared_ports(deployed, component)
            assert port["port"] == declared_ports(deployed, component)[port["targetPort"]]
            addresses.setdefault(service["metadata"]["name"], set()).add(port["port"])
    for role in ROLES:
        config = config_of(deployed, role)
        urls = [config.redis_url]
        if isinstance(config, RouterConfig):
            urls += [config.otlp_endpoint]
            assert (config.trace_exporter == "otlp") == (config.otlp_endpoint is not None)
        for url in filter(None, urls):
            host, port = re.fullmatch(r"\w+://([\w-]+):(\d+)(?:/0)?", url).groups()  # type: ignore[union-attr]
            assert int(port) in addresses[host], url
    for pool in deployed.of("InferencePool"):
        assert deployed.selected(pool["spec"]["selector"]) == {"router"}
        assert [port["number"] for port in pool["spec"]["targetPorts"]] == [config_of(deployed, "router").port]


def declared_ports(deployed: Variant, component: str) -> dict[str, int]:
    """Port numbers of a component's pods, by name."""
    ports = [port for container in containers(deployed.workloads[component]) for port in container["ports"]]
    return {port["name"]: port["containerPort"] for port in ports}


def test_metrics_ports(deployed: Variant) -> None:
    """Pods show their metrics at the port that they declare for it and that PodMonitors scrape."""
    for role in ROLES:
        config = config_of(deployed, role)
        assert declared_ports(deployed, role)["metrics"] == config.metrics_port
        assert config.metrics_host == "0.0.0.0", "Prometheus cannot reach what listens on loopback"
    for monitor in deployed.of("PodMonitor"):
        assert deployed.selected(monitor["spec"]["selector"]) == ROLES
        assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]


def test_images_are_pinned(deployed: Variant) -> None:
    """Every image has a whole version; ours have the project's."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for workload in deployed.workloads.values():
        for container in containers(workload):
            name, _, tag = container["image"].rpartition(":")
            assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), container["image"]
            if name.startswith("baton-"):
                assert tag == version


def test_rollouts(deployed: Variant) -> None:
    """A pool never goes below all but one worker; only decode, and only where devices are spare, surges."""
    for role in ROLES:
        rolling = deployed.workloads[role]["spec"]["strategy"]["rollingUpdate"]
        assert rolling["maxSurge"] + rolling["maxUnavailable"] == 1
        surges = role == "router" or (role == "decode" and "ascend" not in deployed.name)
        assert (rolling["maxSurge"] == 1) == surges


def test_scalers_own_their_numbers(deployed: Variant) -> None:
    """A scaled workload has no number of its own that an apply would set back; a fallback is within the bounds."""
    scaled = set()
    for scaler in deployed.of("ScaledObject"):
        spec = scaler["spec"]
        scaled.add(spec["scaleTargetRef"]["name"])
        assert spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
        assert (
            spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"]
            >= 300
        )
    for name, workload in deployed.workloads.items():
        assert ("replicas" in workload["spec"]) == (workload["metadata"]["name"] not in scaled), name


def test_selectors_can_miss() -> None:
    """`matches` is not true of everything."""
    labels = pod_labels(variant("base").workloads["router"])
    component = "app.kubernetes.io/component"
    assert matches({}, labels) and matches({"matchLabels": {component: "router"}}, labels)
    assert not matches({"matchLabels": {component: "decode"}}, labels)
    expression: dict[str, Any] = {"key": component, "operator": "In", "values": ["decode", "prefill"]}
    assert not matches({"matchExpressions": [expression]}, labels)
