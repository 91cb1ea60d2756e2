"""Every overlay and component renders, and every manifest is one that Kubernetes takes.

Against the strict schemas of the oldest version the manifests are written for, of one between and of the newest known.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from custom_resources import SCHEMAS
from kustomize import MERGE_KEYS, Manifest, NotSupported, pod_spec, render
from manifests import K8S, VARIANTS, Variant, containers, variant

VERSIONS = ("1.30", "1.34", "1.37")
"""1.30 is the first with the preStop sleep on by default."""


@cache
def refusal(text: str, version: str) -> str | None:
    """What a version's strict schema has against a manifest, given as JSON; most are in many variants."""
    manifest = json.loads(text)
    try:
        if manifest["kind"] in SCHEMAS:
            jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
        else:
            assert kubernetes_validate.validate(manifest, version, strict=True) == version
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas(deployed: Variant, version: str) -> None:
    """No manifest has an unknown field or a value of the wrong type."""
    for manifest in deployed.manifests:
        found = refusal(json.dumps(manifest, sort_keys=True), version)
        assert found is None, f"{manifest['kind']} {manifest['metadata']['name']}: {found}"


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas_refuse(version: str) -> None:
    """The check can fail: a misspelt field and a wrong type are found, in ours and in custom resources."""
    by_kind = {manifest["kind"]: manifest for manifest in variant("overlays/ascend everything").manifests}
    for kind, path in (("Deployment", "spec"), ("NetworkPolicy", "spec"), *((kind, "spec") for kind in SCHEMAS)):
        misspelt = by_kind[kind] | {path: by_kind[kind][path] | {"repplicas": 1}}
        assert refusal(json.dumps(misspelt), version), kind
    assert refusal(json.dumps({**by_kind["Service"], "spec": {"ports": "50051"}}), version)


def test_every_component_is_tried() -> None:
    """And every overlay; a component may come with an overlay."""
    overlays = {path.parent.relative_to(K8S).as_posix() for path in K8S.glob("overlays/*/kustomization.yaml")}
    assert {name.split()[0] for name in VARIANTS} == {"base", *overlays}
    listed = {component for components in VARIANTS.values() for component in components}
    for overlay in overlays:
        content = yaml.safe_load((K8S / overlay / "kustomization.yaml").read_text())
        listed |= {Path(component).name for component in content.get("components", [])}
    assert listed == {path.parent.name for path in K8S.glob("components/*/kustomization.yaml")}


def test_every_file_is_used() -> None:
    """No manifest lies there that nothing renders."""
    for kustomization in K8S.glob("**/kustomization.yaml"):
        text = kustomization.read_text()
        for path in kustomization.parent.iterdir():
            if path.is_file() and path != kustomization:
                assert f" {path.name}\n" in text, f"{path} is in no list of {kustomization}"


def test_names_are_unique(deployed: Variant) -> None:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in deployed.manifests]
    assert len(set(names)) == len(names)


def test_references(deployed: Variant) -> None:
    """What a pod names is there: maps, accounts, claims, runtime classes; mounts have volumes, volumes a use."""
    for workload in deployed.workloads.values():
        spec = pod_spec(workload)
        assert spec["serviceAccountName"] in deployed.names("ServiceAccount")
        if "runtimeClassName" in spec:
            assert spec["runtimeClassName"] in deployed.names("RuntimeClass")
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        mounted = [mount["name"] for each in containers(workload) for mount in each.get("volumeMounts", [])]
        assert set(mounted) == volumes.keys()
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in deployed.names("ConfigMap")
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in deployed.names("PersistentVolumeClaim")
        for container in containers(workload):
            for source in container.get("envFrom", []):
                if "configMapRef" in source:
                    assert source["configMapRef"]["name"] in deployed.names("ConfigMap")
                else:
                    assert source["secretRef"]["optional"], "secrets are the operator's; without them it must start"


def test_changed_options_roll_pods(tmp_path: Path) -> None:
    """A generated map is named after what it holds, and pods name it so."""
    folders = {}
    for value in ("1", "2"):
        folder = tmp_path / value
        folder.mkdir()
        (folder / "kustomization.yaml").write_text(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: baton\n"
            f"resources: [{os.path.relpath(K8S / 'base', folder)}]\n"
            "configMapGenerator:\n"
            f"- {{name: baton-decode, behavior: merge, literals: [BATON_MAX_NUM_SEQS={value}]}}\n"
        )
        manifests = render(folder)
        folders[value] = {
            m["metadata"]["name"]: json.dumps(pod_spec(m)) for m in manifests if m["kind"] == "Deployment"
        }
    changed = {name for name in folders["1"] if folders["1"][name] != folders["2"][name]}
    assert changed == {"baton-decode"}


def test_unsupported_parts_are_refused(tmp_path: Path) -> None:
    """The renderer never leaves out what it does not know."""
    header = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
    for text in ("namePrefix: x-\n", "configMapGenerator: [{name: a, envs: [b]}]\n", "patches: [{options: {}}]\n"):
        (tmp_path / "kustomization.yaml").write_text(header + text)
        with pytest.raises(NotSupported):
            render(tmp_path)


def test_rendering_is_kustomizes(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Where a kubectl was given, its rendering of every variant is the same; `make k8s-check` gives one if it can."""
    kubectl = pytestconfig.getoption("--kubectl", default=None)
    for name in VARIANTS if kubectl else ():
        kustomization = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: baton\n"
        kustomization += f"resources: [{os.path.relpath(K8S / name.split()[0], tmp_path)}]\n"
        paths = [os.path.relpath(K8S / "components" / component, tmp_path) for component in VARIANTS[name]]
        (tmp_path / "kustomization.yaml").write_text(kustomization + f"components: {json.dumps(paths)}\n")
        output = subprocess.run([kubectl, "kustomize", tmp_path], check=True, capture_output=True, timeout=60).stdout
        theirs = {identity(manifest): normal(manifest) for manifest in yaml.safe_load_all(output)}
        ours = {identity(manifest): normal(manifest) for manifest in variant(name).manifests}
        assert ours == theirs, name


def identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def normal(node: object, key: str = "") -> object:
    """Without the order of lists that have names."""
    if isinstance(node, dict):
        return {name: normal(value, name) for name, value in node.items()}
    if isinstance(node, list):
        items = [normal(item) for item in node]
        return sorted(items, key=lambda item: item[MERGE_KEYS[key]]) if key in MERGE_KEYS else items
    return node
