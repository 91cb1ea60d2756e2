"""docs/operations.md says nothing of options, components, messages and manifests that is not so."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from kustomize import pod_spec, render
from manifests import K8S, ROOT

from baton.bench.options import BenchConfig
from engine.config import WorkerConfig
from router.config import RouterConfig
from runtime.config import options_of

PAGE = (ROOT / "docs" / "operations.md").read_text()
VARIABLES = {option.variable for cls in (RouterConfig, WorkerConfig) for option in options_of(cls)}


def test_options_exist() -> None:
    """Every variable that the page names is an option of a process, and every flag of `baton bench` is one."""
    named = set(re.findall(r"BATON_[A-Z0-9_]+[A-Z0-9]", PAGE))
    assert named <= VARIABLES and len(named) >= 10, named - VARIABLES
    commands = re.findall(r"`baton bench ([^`]*)`", PAGE)
    flags = {flag for command in commands for flag in re.findall(r"--[\w-]+", command)}
    assert flags <= {option.flag for option in options_of(BenchConfig)} and flags


def test_defaults_are_the_programs() -> None:
    """Values given in brackets after a variable are what it is left at."""
    defaults = {option.variable: option.default for cls in (RouterConfig, WorkerConfig) for option in options_of(cls)}
    told = re.findall(r"`(BATON_\w+)` \(([\d.]+)(?: s)?\)", PAGE)
    assert len(told) >= 2 and all(float(value) == defaults[variable] for variable, value in told), told


def test_components_and_overlays_are_listed() -> None:
    """All of them, each once."""
    for kind in ("overlays", "components"):
        there = {path.parent.name for path in K8S.glob(f"{kind}/*/kustomization.yaml")}
        prefix = "overlays/" if kind == "overlays" else ""
        assert all(PAGE.count(f"| `{prefix}{name}` |") == 1 for name in there), kind


def test_messages_exist() -> None:
    """What the page tells to look for is what the programs say."""
    sources = "".join(
        path.read_text()
        for folder in ("router", "kvstore", "engine", "decode_svc")
        for path in ROOT.glob(f"{folder}/**/*.py")
    )
    table = PAGE.split("## When something is wrong")[1].split("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+ [^`]+)`", row) if not text.startswith("baton ")]
    assert len(quoted) >= 4
    for text in quoted:
        for piece in text.split("..."):
            assert piece.strip() in sources, text


def test_example_overlay_renders(tmp_path: Path) -> None:
    """The example is a kustomization that works, and what it sets arrives."""
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(example.replace("../baton/deploy/k8s", str(K8S)))
    manifests = render(tmp_path)
    decode = next(m for m in manifests if m["kind"] == "Deployment" and m["metadata"]["name"] == "baton-decode")
    assert decode["spec"]["replicas"] == 6
    (container,) = pod_spec(decode)["containers"]
    assert container["image"] == "registry.example/baton-worker@sha256:..."
    data = {key: value for m in manifests if m["kind"] == "ConfigMap" for key, value in m["data"].items()}
    set_there = [line for each in yaml.safe_load(example)["configMapGenerator"] for line in each["literals"]]
    assert dict(line.split("=") for line in set_there).items() <= data.items()
