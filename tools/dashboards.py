"""Writes deploy/grafana/dashboards/*.json: `python -m tools.dashboards`. tests/deploy runs every query against the running stack."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "glm53-prometheus"}
COLUMNS = 24
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: what it shows.
        queries: (PromQL, legend) pairs.
        unit: Grafana's name of the unit.
        text: what to read from it.
        width: of 24 columns.
        kind: Grafana's panel type.
        bounds: smallest and largest value of the axis, where they are known.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    text: str = ""
    width: int = 8
    kind: str = "timeseries"
    bounds: tuple[float, float] | None = None


def rate(name: str, by: str = "") -> str:
    """Events a second, summed, by labels."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({name}{RATE}))"


def quantiles(histogram: str, *shares: float) -> tuple[tuple[str, str], ...]:
    """Queries of a histogram's quantiles."""
    return tuple((f"histogram_quantile({share}, sum by (le) (rate({histogram}_bucket{RATE})))", f"p{share * 100:g}") for share in shares)


def per_step(name: str, legend: str) -> tuple[str, str]:
    """Seconds of something in one decode step."""
    return f"{rate(name)} / {rate('glm53_decode_steps_total')}", legend


def stat(title: str, query: str, unit: str = "short", text: str = "") -> Panel:
    """A single number."""
    return Panel(title, ((query, ""),), unit, text, width=4, kind="stat")


CACHED = rate("glm53_cached_prompt_tokens_total")

OVERVIEW = (
    stat("Gateways with a worker", "sum(glm53_gateway_worker_up)", text="Gateways whose worker takes requests."),
    stat("Running", "sum(glm53_running_requests)", text="Requests in prefill or decode."),
    stat("Waiting", "sum(glm53_queue_depth)", text="Requests in the workers' queues."),
    stat("Tokens made", rate("glm53_decode_tokens_total"), "tok/s"),
    stat("Prompt tokens computed", rate("glm53_prefill_tokens_total"), "tok/s"),
    stat("Hit ratio", "avg(glm53:expert_hit_ratio:rate10m)", "percentunit", "Picks whose expert was in a slot, last 10 minutes."),
    Panel("Tokens made", ((rate("glm53_decode_tokens_total", "instance"), "{{instance}}"),), "tok/s", "By worker.", 12),
    Panel("Prompt tokens computed", ((rate("glm53_prefill_tokens_total", "instance"), "{{instance}}"),), "tok/s", "By worker.", 12),
    Panel(
        "Time to first token",
        (
            *quantiles("glm53_time_to_first_token_seconds", 0.5, 0.9, 0.99),
            (f"histogram_quantile(0.9, sum by (le) (rate(glm53_gateway_time_to_first_token_seconds_bucket{RATE})))", "p90 at the gateway"),
        ),
        "s",
        "From submission to the worker, and from the arrival at the gateway.",
    ),
    Panel("Between two tokens", quantiles("glm53_inter_token_seconds", 0.5, 0.9, 0.99), "s", "Of one request."),
    Panel("Whole request", quantiles("glm53_request_seconds", 0.5, 0.9, 0.99), "s", "From submission to the end."),
    Panel(
        "Queue",
        (
            ("sum by (instance) (glm53_queue_depth)", "waiting {{instance}}"),
            ("sum by (instance) (glm53_running_requests)", "running {{instance}}"),
        ),
    ),
    Panel("Wait in the queue", quantiles("glm53_queue_wait_seconds", 0.5, 0.9, 0.99), "s"),
    Panel(
        "Generation and delivery",
        (("glm53:generation_seconds:mean5m", "made by the worker"), ("glm53:delivery_seconds:mean5m", "delivered by the gateway")),
        "s",
        "Means of 5 minutes. Delivery far above generation: the gateway's CPU, or readers that do not read.",
    ),
    Panel("Answers by status", ((rate("glm53_gateway_http_responses_total", "status"), "{{status}}"),), "reqps"),
    Panel(
        "Errors",
        (
            (rate("glm53_gateway_stream_errors_total", "code"), "stream {{code}}"),
            (rate("glm53_gateway_refusals_total", "code"), "refused {{code}}"),
            (rate("glm53_gateway_client_disconnects_total"), "clients gone"),
            (rate("glm53_gateway_slow_readers_total"), "readers that stopped"),
            (rate("glm53_slow_readers_total"), "gateways that stopped reading"),
        ),
        "reqps",
        "Streams that ended with an error event, requests refused at the door, clients that went away.",
    ),
    Panel("Requests by outcome", ((rate("glm53_requests_total", "outcome"), "{{outcome}}"),), "reqps", "As the worker saw them end."),
    Panel("Prompt size", quantiles("glm53_gateway_request_prompt_tokens", 0.5, 0.9), "short", "Tokens."),
    Panel("Answer size", quantiles("glm53_gateway_request_completion_tokens", 0.5, 0.9), "short", "Tokens."),
    Panel(
        "Prompt tokens from memory",
        ((f"{CACHED} / ({CACHED} + {rate('glm53_prefill_tokens_total')})", "share"),),
        "percentunit",
        "Of all prompt tokens, those whose state was kept from earlier turns.",
        bounds=(0, 1),
    ),
    Panel(
        "Context memory",
        (
            ("sum by (instance) (glm53_context_tokens_used)", "used {{instance}}"),
            ("sum by (instance) (glm53_context_tokens_reserved)", "reserved {{instance}}"),
        ),
        "short",
        "Tokens of context that open streams hold.",
        12,
    ),
    Panel("Requests in flight at the gateways", (("sum by (instance) (glm53_gateway_requests_in_flight)", "{{instance}}"),), width=12),
)

TIERS = (
    stat("CPU lane", "min(glm53_cpu_lane_up)", text="1 while cpu_expert serves jobs; in the exact modes there is no such lane."),
    stat("Hit ratio", "avg(glm53:expert_hit_ratio:rate10m)", "percentunit"),
    stat("Slots used", "sum(glm53_expert_slots_used) / sum(glm53_expert_slots)", "percentunit"),
    stat(
        "Jobs given up",
        "sum(increase(glm53_cpu_lane_aborts_total[1h]))",
        text="CPU-lane jobs of the last hour that the worker computed itself.",
    ),
    stat(
        "Bad records",
        "sum(max_over_time(glm53_checksum_failures_total[1d]))",
        text="Records or slots whose bytes were wrong, since a worker began that ran in the last day.",
    ),
    stat("Arena", "sum(glm53_arena_bytes)", "bytes", "Expert records in shared memory."),
    Panel(
        "Picks by lane", ((rate("glm53_expert_picks_total", "lane"), "{{lane}}"),), "ops", "Where routed picks were computed or fetched."
    ),
    Panel(
        "Hit ratio",
        (
            (
                f"{rate('glm53_expert_decode_hits_total', 'instance')} / {rate('glm53_expert_decode_picks_total', 'instance')}",
                "{{instance}}",
            ),
        ),
        "percentunit",
        "Decode picks whose expert was in a slot.",
        bounds=(0, 1),
    ),
    Panel(
        "Slots",
        (
            ("sum by (instance) (glm53_expert_slots)", "slots {{instance}}"),
            ("sum by (instance) (glm53_expert_slots_used)", "used {{instance}}"),
        ),
    ),
    Panel(
        "Cache",
        ((rate("glm53_expert_admissions_total"), "admissions"), (rate("glm53_expert_evictions_total"), "evictions")),
        "ops",
        "A cache at rest admits little.",
    ),
    Panel(
        "Link",
        ((rate("glm53_expert_bytes_copied_total"), "copied into slots"), (rate("glm53_expert_bytes_in_place_total"), "read in place")),
        "Bps",
        "Bytes of records that crossed from host memory to the device.",
    ),
    Panel(
        "CPU lane reads",
        ((rate("glm53_cpu_lane_bytes_total"), "lane"), (rate("glm53_cpu_expert_bytes_total"), "of it by cpu_expert")),
        "Bps",
        "Bytes of records that the CPU evaluated.",
    ),
    Panel(
        "Time of a decode step",
        (
            per_step("glm53_device_lane_seconds_total", "device lane"),
            per_step("glm53_cpu_lane_seconds_total", "CPU lane"),
            per_step("glm53_cpu_lane_overrun_seconds_total", "waited for the CPU lane"),
            per_step("glm53_plan_seconds_total", "planning"),
        ),
        "s",
        "Seconds of one decode step in each lane. Waiting is what the planner should have avoided.",
        12,
    ),
    Panel(
        "Lane overrun",
        ((f"{rate('glm53_cpu_lane_overrun_seconds_total')} / {rate('glm53_cpu_lane_seconds_total')}", "share of the lane's time"),),
        "percentunit",
        "Time waited for the CPU lane after the device was done, as a share of the lane's time.",
        12,
    ),
    Panel(
        "Given up and computed again",
        ((rate("glm53_cpu_lane_aborts_total"), "jobs"), (rate("glm53_recomputed_picks_total"), "picks")),
        "ops",
        "Not zero: cpu_expert stalls.",
    ),
    Panel(
        "cpu_expert",
        (
            (rate("glm53_cpu_expert_jobs_total"), "jobs"),
            (rate("glm53_cpu_expert_experts_total"), "experts"),
            (rate("glm53_cpu_expert_dropped_total"), "dropped"),
        ),
        "ops",
    ),
    Panel(
        "Drives of the host",
        ((rate("node_disk_read_bytes_total", "device"), "read {{device}}"),),
        "Bps",
        "From node_exporter: all readers, not ours alone.",
    ),
    Panel(
        "Memory",
        (
            ("glm53_memory_used_bytes", "used {{service}} {{instance}}"),
            ("glm53_memory_limit_bytes", "limit {{service}} {{instance}}"),
            ("glm53_arena_bytes", "expert records {{instance}}"),
            ("glm53_shm_free_bytes", "free shared memory {{instance}}"),
        ),
        "bytes",
        "What each service may use and uses. The records are part of gpu_worker's.",
        12,
    ),
    Panel(
        "Share of the memory limit",
        (("glm53:memory_used:ratio", "{{service}} {{instance}}"),),
        "percentunit",
        "At 100 % the kernel ends the process; an alert comes at 95 %.",
        12,
        bounds=(0, 1),
    ),
    Panel(
        "Hits by layer",
        (
            (
                'sum by (layer) (rate(glm53_expert_picks_total{lane="hit"}[5m])) / sum by (layer) (rate(glm53_expert_picks_total[5m]))',
                "{{layer}}",
            ),
        ),
        "percentunit",
        "Of each layer's picks, those that were in a slot: skewed layers hold more slots.",
        12,
        kind="bargauge",
        bounds=(0, 1),
    ),
    Panel(
        "Picks by layer and lane",
        ((rate("glm53_expert_picks_total", "layer, lane"), "{{layer}} {{lane}}"),),
        "ops",
        "The heat of layers over time.",
        12,
        kind="heatmap",
    ),
)

HOST = (
    stat("CPU in use", 'avg(1 - rate(node_cpu_seconds_total{mode="idle"}[1m]))', "percentunit"),
    stat("Load", "sum(node_load1)", text="Of one minute."),
    stat("Memory available", "sum(node_memory_MemAvailable_bytes)", "bytes"),
    stat("Shared memory", "sum(node_memory_Shmem_bytes)", "bytes", "The expert records are here."),
    stat("Swap in use", "sum(node_memory_SwapTotal_bytes - node_memory_SwapFree_bytes)", "bytes", "Should be zero."),
    stat("Up since", "time() - min(node_boot_time_seconds)", "s"),
    Panel(
        "CPU by mode",
        (('sum by (mode) (rate(node_cpu_seconds_total{mode!="idle"}[1m]))', "{{mode}}"),),
        "short",
        "CPUs' worth of time; steal is another guest's.",
    ),
    Panel("CPU by core", (('1 - rate(node_cpu_seconds_total{mode="idle"}[1m])', "CPU {{cpu}}"),), "percentunit", bounds=(0, 1)),
    Panel("Context switches", (("rate(node_context_switches_total[1m])", "{{instance}}"),), "ops"),
    Panel(
        "Memory",
        (
            ("node_memory_MemTotal_bytes", "total"),
            ("node_memory_MemAvailable_bytes", "available"),
            ("node_memory_Shmem_bytes", "shared"),
            ("node_memory_Mlocked_bytes", "locked"),
        ),
        "bytes",
    ),
    Panel(
        "Page faults that read a drive", (("rate(node_vmstat_pgmajfault[1m])", "{{instance}}"),), "ops", "Not near zero: memory is short."
    ),
    Panel(
        "Transparent huge pages",
        (("node_memory_AnonHugePages_bytes", "anonymous"), ("node_memory_ShmemHugePages_bytes", "shared")),
        "bytes",
    ),
    Panel("Drive reads", (("rate(node_disk_read_bytes_total[1m])", "{{device}}"),), "Bps"),
    Panel("Drive writes", (("rate(node_disk_written_bytes_total[1m])", "{{device}}"),), "Bps"),
    Panel("Drive busy", (("rate(node_disk_io_time_seconds_total[1m])", "{{device}}"),), "percentunit"),
    Panel("Network received", (("rate(node_network_receive_bytes_total[1m])", "{{device}}"),), "Bps"),
    Panel("Network sent", (("rate(node_network_transmit_bytes_total[1m])", "{{device}}"),), "Bps"),
    Panel("Free on file systems", (("node_filesystem_avail_bytes", "{{mountpoint}}"),), "bytes"),
)

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": ("Overview", OVERVIEW),
    "tiers": ("Tiers", TIERS),
    "host": ("Host", HOST),
}


def dashboard(name: str) -> dict[str, Any]:
    """The whole document of one dashboard."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"glm53-{name}",
        "title": f"glm53 {title}",
        "tags": ["glm53-offload"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {"title": "glm53", "type": "dashboards", "tags": ["glm53-offload"], "asDropdown": False, "includeVars": False, "keepTime": True}
        ],
        "panels": _placed(panels),
    }


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Panels from left to right, a row as high as its highest panel."""
    found, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        own = 4 if panel.kind == "stat" else 8
        if x + panel.width > COLUMNS:
            x, y, height = 0, y + height, 0
        found.append(_panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": own}))
        x, height = x + panel.width, max(height, own)
    return found


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.bounds:
        defaults |= {"min": panel.bounds[0], "max": panel.bounds[1]}
    # A number, a bar: the newest value only.
    newest = panel.kind in ("stat", "bargauge")
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": expression,
            "legendFormat": legend or "__auto",
            "instant": newest,
            "range": not newest,
        }
        for index, (expression, legend) in enumerate(panel.queries)
    ]
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}} if newest else {}
    if panel.kind == "timeseries":
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def text(name: str) -> str:
    """The file's text."""
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (OUT / f"{name}.json").write_text(text(name))
