"""Every query of the dashboards and alerts can be parsed, and finds something in scrapes of a system that works.

The system is `baton serve` over the tracer, with a worker of each role, after requests of several kinds. A selector
must find a series with each label value that it asks for, so that no panel stays empty because of a name.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from manifests import ROOT
from prometheus_client.parser import text_string_to_metric_families

from baton import AsyncClient
from baton.options import ServeConfig
from baton.serving import running
from baton.topology import choose_ports

DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
VARIABLES = ["datasource", "namespace", "model_name", "job"]
TARGET_LABELS = {"namespace", "job", "instance"}
"""Given by Prometheus, not by us."""


@dataclass(frozen=True)
class Query:
    """One expression and where it stands."""

    place: str
    text: str

    def selectors(self) -> Iterator[promql_parser.VectorSelector]:
        """All of it that names series. Raises ValueError for what is no PromQL."""
        found: list[promql_parser.VectorSelector] = []

        def visit(expression: Any) -> None:
            if isinstance(expression, promql_parser.VectorSelector):
                found.append(expression)
            elif isinstance(expression, promql_parser.MatrixSelector):
                found.append(expression.vector_selector)

        plain = self.text.replace("$__rate_interval", "1m")
        plain = re.sub(r'[a-z_]+=~"\$(namespace|model_name|job)"', r'\1=~".*"', plain)
        assert "$" not in plain, f"{self.place}: an unknown variable in {self.text}"
        promql_parser.walk(promql_parser.parse(plain), visit)
        return iter(found)


def boards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in DASHBOARDS]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries() -> list[Query]:
    """Of panels, alerts and recorded series."""
    found = [
        Query(f"{board['uid']}: {panel['title']}", target["expr"])
        for board in boards()
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    return found + [Query(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


def test_queries_are_promql() -> None:
    """All of them, and each names at least one series; the parser refuses what is not."""
    for query in queries():
        assert list(query.selectors()), query
    assert len(queries()) > 100
    with pytest.raises(ValueError):
        list(Query("wrong", "sum(rate(a[5m])").selectors())


@dataclass(frozen=True)
class Series:
    """One series of some process."""

    name: str
    labels: dict[str, str]


@pytest.fixture(scope="module")
def series() -> list[Series]:
    """Of all processes of a system under load."""
    return asyncio.run(scraped_under_load())


async def scraped_under_load() -> list[Series]:
    port = next(port for port in choose_ports(100) if all(map(is_free, range(port, port + 4))))
    config = ServeConfig(
        "tracer", port=0, num_mixed=1, kv_cache_gpu_mem_utilization=0.01, metrics_port=port, lend_cores=False
    )
    async with running(config, lambda _: None) as system, AsyncClient(system.topology.addresses[0]) as client:
        loading = [asyncio.create_task(ask(client, number)) for number in range(24)]
        await loading[0]
        during = [await asyncio.to_thread(scrape, port + index) for index in range(4)]
        await asyncio.gather(*loading)
        after = [await asyncio.to_thread(scrape, port + index) for index in range(4)]
    return [each for page in (*during, *after) for each in page]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def ask(client: AsyncClient, number: int) -> None:
    """A turn of a session, a longer answer or a plain one; each has a prompt of its own."""
    session = {"session_id": f"s{number}"} if number % 3 == 0 else {}
    async for _ in client.generate(
        prompt_token_ids=[number % 250 + 1] * 40, max_tokens=8 + 50 * (number % 3 == 1), ignore_eos=True, **session
    ):
        pass


def scrape(port: int) -> list[Series]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return [
        Series(sample.name, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def test_queries_find_what_is_there(series: list[Series]) -> None:
    """Each selector, with each value of its labels, has a series; recorded ones are recorded."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for query in queries():
        for selector in query.selectors():
            if selector.name in recorded:
                continue
            for labels in alternatives(selector):
                fitting = [s for s in series if s.name == selector.name and labels.items() <= s.labels.items()]
                assert fitting, f"{query.place}: nothing is {selector.name} {labels}"


def alternatives(selector: Any) -> Iterator[dict[str, str]]:
    """What a selector asks for, value by value."""
    yield {}
    for matcher in selector.matchers.matchers:
        if matcher.name in TARGET_LABELS or matcher.value == ".*":
            continue
        if matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.Re):
            for value in matcher.value.split("|"):
                yield {matcher.name: value}
        else:
            assert matcher.op is promql_parser.MatchOp.NotEqual, "no other is needed"


def test_labels_that_queries_group_by_exist(series: list[Series]) -> None:
    """What panels are told apart by is a label of what they show."""
    by_name: dict[str, set[str]] = {}
    for each in series:
        by_name.setdefault(each.name, set()).update(each.labels)
    for board in boards():
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                query = Query(panel["title"], target["expr"])
                labels = set().union(*(by_name.get(selector.name, set()) for selector in query.selectors()))
                wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                wanted |= {
                    word for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query.text) for word in group.split(", ")
                }
                assert wanted <= labels | TARGET_LABELS, f"{board['uid']}: {panel['title']}: {wanted - labels}"


def test_names_of_ours_are_documented(series: list[Series]) -> None:
    """docs/operations.md has a line for each metric that begins with baton_, and none for others."""
    page = (ROOT / "docs" / "operations.md").read_text()
    told = set(re.findall(r"^\| `(baton_\w+)`", page, re.MULTILINE))
    shown = {re.sub(r"_(bucket|sum|count)$", "", each.name) for each in series if each.name.startswith("baton_")}
    assert told == shown, told ^ shown


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_whole(path: Path) -> None:
    """Fixed ids, the four variables, every panel described, of the chosen data source, in a place of its own."""
    board = json.loads(path.read_text())
    assert board["uid"].startswith("baton-") and board["schemaVersion"] >= 39 and "baton" in board["tags"]
    assert [variable["name"] for variable in board["templating"]["list"]] == VARIABLES
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} lies on another"
        cells |= own
        if panel["type"] != "row":
            assert panel["description"].endswith(".") and panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all("$namespace" in t["expr"] and "$model_name" in t["expr"] for t in panel["targets"])


def test_boards_are_those_that_operators_ask_for() -> None:
    uids = [board["uid"] for board in boards()]
    assert sorted(uids) == ["baton-failures", "baton-kv", "baton-latency", "baton-overview", "baton-pools"]


def test_alerts_are_explained() -> None:
    """Each has a severity, a summary, and a section of docs/operations.md that its runbook leads to."""
    page = (ROOT / "docs" / "operations.md").read_text()
    sections = {heading.lower() for heading in re.findall(r"^#### (\w+)$", page, re.MULTILINE)}
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) >= 10
    for alert in alerts:
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert alert["annotations"]["summary"].endswith(".")
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"
    assert sections == {alert["alert"].lower() for alert in alerts}


def promtool() -> str:
    """The one on PATH, or the one that `make tools` got; skips where it could get none."""
    found = shutil.which("promtool") or shutil.which(ROOT / ".tools" / "promtool")
    if found is None:
        pytest.skip("promtool is neither on PATH nor in .tools: `make tools` gets it, or says why it cannot")
    return found


def test_promtool_takes_the_rules() -> None:
    """The rule file as Prometheus itself reads it."""
    run = subprocess.run([promtool(), "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_promtool_plays_the_alerts() -> None:
    """Each alert fires where it should and is silent where nothing is wrong; deploy/prometheus/alerts.test.yaml."""
    played = ALERTS.with_name("alerts.test.yaml")
    run = subprocess.run([promtool(), "test", "rules", str(played)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    tested = {
        case["alertname"] for test in yaml.safe_load(played.read_text())["tests"] for case in test["alert_rule_test"]
    }
    assert tested == {rule["alert"] for rule in rules() if "alert" in rule}
