"""What is deployed: every overlay, alone and with each component that fits it, and how to look into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kustomize import Manifest, pod_spec, render

from engine.config import WorkerConfig
from router.config import RouterConfig
from runtime import config as configuration

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
VARIANTS: dict[str, tuple[str, ...]] = {
    "base": (),
    "overlays/cpu": (),
    "overlays/cpu otel-collector": ("otel-collector",),
    "overlays/cpu pod-monitor keda": ("pod-monitor", "keda"),
    "overlays/cpu inference-pool": ("inference-pool",),
    "overlays/cpu valkey-sentinel": ("valkey-sentinel",),
    "overlays/ascend": (),
    "overlays/ascend ascend-host-driver": ("ascend-host-driver",),
    "overlays/ascend everything": ("otel-collector", "pod-monitor", "keda", "inference-pool", "valkey-sentinel"),
}
"""Name, the first word of which is a folder: components that are added."""
CONFIGS = {"router": RouterConfig, "prefill_svc": WorkerConfig, "decode_svc": WorkerConfig}
"""What each module of ours takes."""
ROLES = {"router", "prefill", "decode"}
COMPONENT = "app.kubernetes.io/component"


@dataclass(frozen=True, eq=False)
class Variant:
    """A rendered deployment; equal to itself alone."""

    name: str
    manifests: tuple[Manifest, ...]

    def of(self, *kinds: str) -> list[Manifest]:
        """Manifests of these kinds."""
        return [manifest for manifest in self.manifests if manifest["kind"] in kinds]

    def names(self, kind: str) -> set[str]:
        return {manifest["metadata"]["name"] for manifest in self.of(kind)}

    @property
    def workloads(self) -> dict[str, Manifest]:
        """What makes pods, by component."""
        found = {pod_labels(workload)[COMPONENT]: workload for workload in self.of("Deployment", "StatefulSet")}
        assert len(found) == len(self.of("Deployment", "StatefulSet"))
        return found

    def selected(self, selector: dict[str, Any]) -> set[str]:
        """The components whose pods a label selector picks."""
        return {name for name, workload in self.workloads.items() if matches(selector, pod_labels(workload))}

    def environment(self, container: dict[str, Any]) -> dict[str, str]:
        """The container's variables, as far as the manifests say them; references to fields stand for themselves."""
        data = {manifest["metadata"]["name"]: manifest["data"] for manifest in self.of("ConfigMap")}
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            if "configMapRef" in source:
                found |= data[source["configMapRef"]["name"]]
        for variable in container.get("env", []):
            found[variable["name"]] = variable.get("value") or variable["valueFrom"]["fieldRef"]["fieldPath"]
        return found


@cache
def variant(name: str) -> Variant:
    folder = K8S / name.split()[0]
    components = tuple(K8S / "components" / component for component in VARIANTS[name])
    return Variant(name, tuple(render(folder, components)))


def pod_labels(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector picks something with these labels; an empty one picks everything."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def containers(workload: Manifest) -> Iterator[dict[str, Any]]:
    yield from pod_spec(workload)["containers"]


def loaded(argv: list[str], environment: dict[str, str], *, prog: str) -> RouterConfig | WorkerConfig:
    """The configuration that a process of ours makes of its arguments (module first) and variables. ConfigError where
    it would not start, AssertionError for a variable of ours that it would not look at."""
    cls: type[RouterConfig] | type[WorkerConfig] = CONFIGS[argv[0]]
    known = {option.variable for option in configuration.options_of(cls)}
    unknown = {name for name in environment if name.startswith(configuration.ENVIRONMENT_PREFIX)} - known
    assert not unknown, f"{prog}: no option of {argv[0]} reads {unknown}"
    return configuration.load(cls, argv[1:], prog=prog, description="", env=environment)


@cache
def config_of(deployed: Variant, role: str) -> RouterConfig | WorkerConfig:
    """The configuration of a role's process."""
    (container,) = containers(deployed.workloads[role])
    return loaded(container["args"], deployed.environment(container), prog=f"{deployed.name}: {role}")


_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]
