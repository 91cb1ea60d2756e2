"""Renders kustomizations without a kustomize: the part of it that `deploy/k8s` uses, and an error for every other part.

Resources, components, namespace, replicas, images, generated ConfigMaps with hashed names, and strategic-merge patches.
Where there is a kubectl, `make k8s-check` holds this against `kubectl kustomize`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

CLUSTER_KINDS = {"Namespace", "RuntimeClass"}
MERGE_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""Lists whose items are merged by name. Others are replaced as a whole, as their schemas say, or refused here."""
REPLACED = {"args", "command", "topologySpreadConstraints", "supplementalGroups", "drop"}
HASH_LETTERS = str.maketrans("013ae", "ghkmt")
"""So that no hash reads like a word."""


class NotSupported(Exception):
    """A kustomization uses something that is not rendered here."""


@dataclass
class Rendering:
    """What has come together so far."""

    manifests: list[Manifest] = field(default_factory=list)
    generated: dict[str, dict[str, str]] = field(default_factory=dict)
    namespace: str | None = None

    def find(self, kind: str, name: str) -> list[Manifest]:
        """Those whose whole name matches the pattern `name`."""
        return [m for m in self.manifests if m["kind"] == kind and re.fullmatch(name, m["metadata"]["name"])]


def render(folder: Path, components: tuple[Path, ...] = ()) -> list[Manifest]:
    """All manifests of a kustomization, with further components as if it listed them."""
    rendering = Rendering()
    _accumulate(folder, rendering)
    for component in components:
        _accumulate(component, rendering)
    return _finish(rendering)


def _accumulate(folder: Path, rendering: Rendering) -> None:
    content = yaml.safe_load((folder / "kustomization.yaml").read_text())
    kind = content.pop("kind")
    assert content.pop("apiVersion") == f"kustomize.config.k8s.io/{'v1alpha1' if kind == 'Component' else 'v1beta1'}"
    for entry in content.pop("resources", []):
        path = folder / entry
        if path.is_dir():
            _accumulate(path, rendering)
        else:
            rendering.manifests += yaml.safe_load_all(path.read_text())
    for entry in content.pop("components", []):
        _accumulate(folder / entry, rendering)
    for generator in content.pop("configMapGenerator", []):
        _generate(generator, folder, rendering)
    for patch in content.pop("patches", []):
        _apply(patch, folder, rendering)
    rendering.namespace = content.pop("namespace", rendering.namespace)
    for image in content.pop("images", []):
        _rename_image(image, rendering)
    for replicas in content.pop("replicas", []):
        (deployment,) = rendering.find("Deployment", replicas["name"])
        deployment["spec"]["replicas"] = replicas["count"]
    if content:
        raise NotSupported(f"{folder}: {', '.join(content)}")


def _generate(generator: dict[str, Any], folder: Path, rendering: Rendering) -> None:
    unknown = generator.keys() - {"name", "behavior", "literals", "files"}
    if unknown:
        raise NotSupported(f"{folder}: configMapGenerator: {unknown}")
    data = dict(line.split("=", 1) for line in generator.get("literals", []))
    data |= {name: (folder / name).read_text() for name in generator.get("files", [])}
    name, merges = generator["name"], generator.get("behavior") == "merge"
    assert merges == (name in rendering.generated), f"{folder}: {name} exists already, or is not there to be merged"
    rendering.generated.setdefault(name, {}).update(data)


def _apply(entry: dict[str, Any], folder: Path, rendering: Rendering) -> None:
    unknown = entry.keys() - {"path", "patch", "target"}
    if unknown:
        raise NotSupported(f"{folder}: patches: {unknown}")
    patch = yaml.safe_load(entry["patch"] if "patch" in entry else (folder / entry["path"]).read_text())
    target = entry.get("target", {"kind": patch["kind"], "name": patch["metadata"]["name"]})
    found = rendering.find(target["kind"], target["name"])
    assert found, f"{folder}: no {target['kind']} is named {target['name']}"
    if patch.pop("$patch", None) == "delete":
        rendering.manifests = [m for m in rendering.manifests if m not in found]
        return
    for manifest in found:
        name = manifest["metadata"]["name"]
        _merge(manifest, patch)
        manifest["metadata"]["name"] = name


def _merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    """Strategic merge: null deletes, maps are merged, lists by their key or not at all."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, list) and key in MERGE_KEYS and key in into:
            into[key] = _merged_list(into[key], value, MERGE_KEYS[key])
        elif isinstance(value, list) and key in into and key not in REPLACED:
            raise NotSupported(f"a patch of the list {key}")
        elif isinstance(value, dict):
            into[key] = {}
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


def _merged_list(items: list[Any], patches: list[Any], key: str) -> list[Any]:
    by_key = {item[key]: item for item in items}
    new = []
    for patch in patches:
        if patch[key] in by_key:
            _merge(by_key[patch[key]], patch)
        else:
            new.append(copy.deepcopy(patch))
    return new + items


def _rename_image(image: dict[str, str], rendering: Rendering) -> None:
    for manifest in rendering.manifests:
        for container in pod_spec(manifest).get("containers", []):
            name, _, tag = container["image"].rpartition(":")
            if name == image["name"]:
                version = f"@{image['digest']}" if "digest" in image else f":{image.get('newTag', tag)}"
                container["image"] = image.get("newName", name) + version


def _finish(rendering: Rendering) -> list[Manifest]:
    """Sets the namespace, and gives generated ConfigMaps the names that follow from what they hold."""
    names = {name: f"{name}-{_hash(data)}" for name, data in rendering.generated.items()}
    maps = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": names[name]}, "data": data}
        for name, data in rendering.generated.items()
    ]
    for manifest in rendering.manifests:
        _rename_references(pod_spec(manifest), names)
    manifests = rendering.manifests + maps
    for manifest in manifests:
        if manifest["kind"] == "Namespace":
            manifest["metadata"]["name"] = rendering.namespace
        elif manifest["kind"] not in CLUSTER_KINDS:
            manifest["metadata"]["namespace"] = rendering.namespace
    return manifests


def _hash(data: dict[str, str]) -> str:
    content = {"data": data, "kind": "ConfigMap", "name": ""}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return hashlib.sha256(text.encode()).hexdigest()[:10].translate(HASH_LETTERS)


def _rename_references(node: Any, names: dict[str, str]) -> None:
    if isinstance(node, list):
        for item in node:
            _rename_references(item, names)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("configMap", "configMapRef"):
                value["name"] = names.get(value["name"], value["name"])
            else:
                _rename_references(value, names)


def pod_spec(manifest: Manifest) -> dict[str, Any]:
    """The spec of a workload's pods; empty for everything else."""
    spec: dict[str, Any] = manifest.get("spec", {}).get("template", {}).get("spec", {})
    return spec
