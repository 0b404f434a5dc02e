"""The dashboards: provisioned, in order, and every panel has data while the real stack serves."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import server as serving
from cli import main as glm53
from tests.deploy.monitoring import PROMETHEUS, ROOT, own_names, program, recorded, rules
from tools import dashboards, metrics_table

GRAFANA = ROOT / "deploy" / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
READY_S = 60
MODEL = "glm-5.3-tiny"
# Scrapes come every second here: a minute's rate has its samples soon.
TRAFFIC_S = 12


def targets() -> list[tuple[str, str]]:
    """(dashboard/panel, expression) of every query."""
    return [
        (f"{path.stem}/{panel['id']} {panel['title']}", target["expr"])
        for path in FILES
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]


def test_the_dashboards_are_up_to_date() -> None:
    """The files equal what tools/dashboards.py writes."""
    assert {path.stem for path in FILES} == set(dashboards.DASHBOARDS)
    for path in FILES:
        assert path.read_text() == dashboards.text(path.stem)


def test_dashboards_fit_the_provisioning() -> None:
    """Panels name the provisioned data source, have ids of their own and do not overlap; dashboards have ids of their own."""
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/glm53.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana-dashboards"
    documents = [json.loads(path.read_text()) for path in FILES]
    assert len({document["uid"] for document in documents}) == len(documents)
    for document in documents:
        panels = document["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            own = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
            assert at["x"] + at["w"] <= dashboards.COLUMNS
            assert cells.isdisjoint(own), panel["title"]
            cells |= own
            assert panel["datasource"]["uid"] == source["uid"]
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {source["uid"]}


def test_queries_read_what_the_services_export() -> None:
    """Every series of ours that a panel reads is exported by the code or made by a rule."""
    known = metrics_table.names() | recorded()
    for where, expression in targets():
        assert own_names(expression) <= known, where


# ---- against the running stack -----------------------------------------------------------------------------------------------------------


@dataclass
class Monitored:
    """A running stack, and the Prometheus that scrapes it."""

    server: serving.Server
    url: str
    key: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What Prometheus answers to an instant query."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success"
        return list(answer["data"]["result"])

    def ask(self, body: dict[str, Any], key: str | None = None, read_bytes: int | None = None) -> int:
        """One chat request; the status. read_bytes: leave after so many."""
        request = urllib.request.Request(
            f"{self.server.url}/v1/chat/completions",
            json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Count from one to fifty."}], **body}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                reply.read(read_bytes)
                return int(reply.status)
        except urllib.error.HTTPError as error:
            error.read()
            return error.code


@contextlib.contextmanager
def process(*command: str | Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program for the length of a block."""
    with log.open("wb") as out:
        running = subprocess.Popen([str(word) for word in command], stdout=out, stderr=subprocess.STDOUT)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(20)


def own_config(folder: Path, ports: dict[str, int]) -> Path:
    """prometheus-host.yml with the ports of this run and a scrape every second; nothing else is changed."""
    text = (PROMETHEUS / "prometheus-host.yml").read_text()
    for port, own in {"30000": "gateway", "30061": "gpu-worker", "30062": "cpu-expert", "9090": "prometheus", "9100": "node"}.items():
        assert f"127.0.0.1:{port}" in text
        text = text.replace(f'"127.0.0.1:{port}"', f'"127.0.0.1:{ports[own]}"')
    config = yaml.safe_load(text)
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "rules" / "*.yml")]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def wait_until(check: Any, what: str) -> None:
    """Waits for a check that may fail for a while."""
    deadline = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError):
            if check():
                return
        assert time.monotonic() < deadline, f"{what} within {READY_S} s"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """Stack, node_exporter and Prometheus, with traffic of every kind that the panels show, while the tests ask."""
    folder = tmp_path_factory.mktemp("monitored")
    ports = {name: serving.free_port() for name in ("gateway", "gpu-worker", "cpu-expert", "prometheus", "node")}
    keys = folder / "keys.json"
    with (folder / "key").open("w") as out, contextlib.redirect_stdout(out):
        assert glm53.main(["keys", "create", "--file", str(keys), "--id", "dashboards", "--admin"]) == 0
    key = (folder / "key").read_text().strip()
    env = {
        "GLM53_WORKER_HTTP": f"127.0.0.1:{ports['gpu-worker']}",
        "GLM53_EXPERT_HTTP": f"127.0.0.1:{ports['cpu-expert']}",
        "GLM53_API_KEYS_FILE": str(keys),
    }
    exporter = program("prometheus-node-exporter", "prometheus-node-exporter")
    prometheus = program("prometheus", "prometheus")
    with contextlib.ExitStack() as stack:
        server = serving.start(folder, env=env, port=ports["gateway"])
        stack.callback(server.stop)
        stack.enter_context(process(exporter, f"--web.listen-address=127.0.0.1:{ports['node']}", log=folder / "node.log"))
        storage = f"--storage.tsdb.path={folder / 'data'}"
        listen = f"--web.listen-address=127.0.0.1:{ports['prometheus']}"
        stack.enter_context(
            process(prometheus, f"--config.file={own_config(folder, ports)}", storage, listen, log=folder / "prometheus.log")
        )
        run = Monitored(server, f"http://127.0.0.1:{ports['prometheus']}", key)
        wait_until(lambda: len(run.query("up == 1")) == len(ports), "all targets are up")
        stop = threading.Event()
        traffic = threading.Thread(target=_traffic, args=(run, stop), daemon=True)
        stack.callback(traffic.join, 60)
        stack.callback(stop.set)
        traffic.start()
        _break_a_stream(run)
        time.sleep(TRAFFIC_S)
        yield run


def _traffic(run: Monitored, stop: threading.Event) -> None:
    """Answers, streams, clients that leave, wrong keys and wrong requests, until told to stop."""
    while not stop.is_set():
        # The worker is killed meanwhile, and answers may be cut off with it.
        with contextlib.suppress(OSError, http.client.HTTPException):
            run.ask({"max_tokens": 24})
            run.ask({"max_tokens": 24, "stream": True})
            run.ask({"max_tokens": 400, "stream": True}, read_bytes=300)
            run.ask({"max_tokens": 4}, key="a-key-that-nobody-has")
            run.ask({"max_tokens": -4})


def _break_a_stream(run: Monitored) -> None:
    """A worker that dies under a stream: the client gets an error event, which is counted; the supervisor starts it again."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 4000, "stream": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {run.key}"}
    request = urllib.request.Request(f"{run.server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.read(1000)
        os.kill(run.server.pid_of("gpu_worker"), signal.SIGKILL)
        assert b'"error"' in reply.read()
    wait_until(lambda: run.server.get_json("/health").get("status") == "ok", "the worker is back")


def values_of(result: list[dict[str, Any]]) -> list[float]:
    """The numbers of an instant query's answer, without those that are none (0/0)."""
    return [value for value in (float(entry["value"][1]) for entry in result) if math.isfinite(value)]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_every_panel_has_data_from_the_running_stack(monitored: Monitored) -> None:
    """Each query of each panel answers with numbers while the stack serves: names, labels and arithmetic are the real ones."""
    waiting = targets()
    deadline = time.monotonic() + READY_S
    # A rate needs two scrapes of what a client's request changed.
    while waiting and time.monotonic() < deadline:
        waiting = [(where, query) for where, query in waiting if not values_of(monitored.query(query.replace("$__rate_interval", "1m")))]
        time.sleep(0.5)
    assert not waiting


# Series that stay at nought on a sound machine, or that only a GPU or a drive moves. An answer of nought shows that the name is right, no
# more: a query that reads none of these must move.
STILL = {
    "glm53_queue_depth": "requests wait only under more load than this",
    "glm53_slow_readers_total": "the gateway here reads",
    "glm53_gateway_slow_readers_total": "every client here reads",
    "glm53_cpu_lane_aborts_total": "no job is given up on a sound machine",
    "glm53_recomputed_picks_total": "no job is given up on a sound machine",
    "glm53_checksum_failures_total": "no record is damaged",
    "glm53_cpu_expert_dropped_total": "no job is given up on a sound machine",
    "glm53_cpu_lane_overrun_seconds_total": "a machine may be quick enough never to wait",
    "glm53_cached_prompt_tokens_total": "the traffic's prompts are shorter than what is kept",
    "glm53_expert_evictions_total": "the shipped model's experts fit into their slots",
    "node_memory_Swap": "a machine without swap",
    "node_memory_Mlocked_bytes": "nothing is pinned without a GPU",
    "node_vmstat_pgmajfault": "everything is in the page cache",
    "node_memory_ShmemHugePages_bytes": "huge pages are switched off for shared memory",
    "node_memory_AnonHugePages_bytes": "depends on the machine's switch",
    "node_disk_": "the page cache answers",
    "node_network_": "the traffic is on the loopback device, which a container may not show",
}


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_panels_move_with_the_traffic(monitored: Monitored) -> None:
    """A query whose answer is nought while the stack serves shows nothing: each moves, but for those that are named with their reason."""
    waiting = {query: where for where, query in targets() if not any(name in query for name in STILL)}
    assert len(waiting) > len(targets()) // 2
    deadline = time.monotonic() + READY_S
    while waiting and time.monotonic() < deadline:
        for query in list(waiting):
            if any(values_of(monitored.query(query.replace("$__rate_interval", "1m")))):
                del waiting[query]
        time.sleep(0.5)
    assert not waiting


def test_series_named_as_still_are_on_panels() -> None:
    """A reason for a panel that is gone goes too."""
    assert [name for name in STILL if not any(name in query for _, query in targets())] == []


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_every_rule_is_evaluated_on_the_running_stack(monitored: Monitored) -> None:
    """Recording rules make series, alerts that should be silent are, and none fails to evaluate."""
    with urllib.request.urlopen(f"{monitored.url}/api/v1/rules", timeout=10) as reply:
        groups = json.load(reply)["data"]["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) == len(rules())
    assert {rule["health"] for rule in evaluated} == {"ok"}
    assert {rule["name"]: rule["state"] for rule in evaluated if rule["name"] == "Glm53MemoryNearCap"} == {"Glm53MemoryNearCap": "inactive"}
    for name in recorded():
        assert values_of(monitored.query(name)), name


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_nothing_is_counted_twice(monitored: Monitored) -> None:
    """The gateway passes the worker's counters on and the worker is scraped too: each series is kept once."""
    for name in ("glm53_decode_tokens_total", "glm53_arena_bytes", "glm53_expert_slots"):
        assert len(monitored.query(name)) == 1
    assert {entry["metric"]["job"] for entry in monitored.query("glm53_gateway_worker_up")} == {"gateway"}
