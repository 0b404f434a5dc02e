"""The Kubernetes manifests, rendered as `kubectl apply -k` renders them: valid, hardened, consistent with the services."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from services.common import shm_room
from services.common.settings import ServiceSettings
from services.cpu_expert.settings import CpuExpertSettings
from services.gateway.fleet.members import addresses_of
from services.gateway.settings import GatewaySettings
from services.gpu_worker.backends import cpu_arena
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.settings import GpuWorkerSettings
from tests.deploy import manifests as k8s
from tests.deploy.manifests import K8S, OVERLAYS, ROOT, Manifest, container, environment, find, in_bytes, pod_of, render, tool, workloads

VERSION = "1.37"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "gpu-worker": GpuWorkerSettings,
    "cpu-expert": CpuExpertSettings,
}
# Kinds of operators, whose schemas Kubernetes does not have.
OPERATOR_KINDS = {"ScaledObject", "ServiceMonitor", "PodMonitor"}
# docs/install.md tells how to make it.
MADE_BY_HAND = {("Secret", "gateway-keys")}
# 42 layers of 288 experts of GLM-5.3-Flash.
RECORD_BYTES = 42 * 288 * 9_474_048


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> list[Manifest]:
    """Each overlay's manifests."""
    return render(request.param)


def test_every_overlay_fits_the_schemas(tmp_path: Path) -> None:
    """kubernetes-validate --strict: no unknown field, no missing one, in anything but the operators' kinds."""
    different: dict[str, Manifest] = {}
    for name in OVERLAYS:
        assert {manifest["kind"] for manifest in render(name)} & OPERATOR_KINDS <= {"ScaledObject"}
        different |= {yaml.safe_dump(manifest): manifest for manifest in render(name) if manifest["kind"] not in OPERATOR_KINDS}
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(different.values()))
    checked = tool("kubernetes-validate", "-k", VERSION, "--strict", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_schemas_are_strict(tmp_path: Path) -> None:
    """The check above notices a misspelt field."""
    deployment = k8s.worker(render("cpu"))
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["failureTreshold"] = 3
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(deployment))
    assert tool("kubernetes-validate", "-k", VERSION, "--strict", path).returncode != 0


def test_checkov_finds_nothing(tmp_path: Path) -> None:
    """The posture of both ways to run the worker; what is left out, and why, is in deploy/k8s/.checkov.yaml."""
    checkov = ROOT / ".state" / "checkov-venv" / "bin" / "checkov"
    if not checkov.exists():
        pytest.fail("checkov is not installed: make setup-dev")
    for name in ("cpu", "scale-out"):
        (tmp_path / f"{name}.yaml").write_text(k8s.rendered_text(name))
    options = ("--framework", "kubernetes", "--compact", "--quiet", "--skip-download", "--config-file", K8S / ".checkov.yaml")
    checked = tool(checkov, "-d", tmp_path, *options)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    hole = k8s.worker(render("cpu"))
    hole["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privileged"] = True
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump(hole))
    assert "privileged" in tool(checkov, "-d", tmp_path, *options).stdout


def test_the_files_are_clean_yaml() -> None:
    """yamllint, on what people read."""
    rules = "{extends: relaxed, rules: {line-length: {max: 160}, document-start: disable}}"
    checked = tool("yamllint", "--strict", "-d", rules, "deploy/k8s", "deploy/prometheus", "deploy/grafana")
    assert checked.returncode == 0, checked.stdout


def test_the_folder_itself_is_the_overlay_that_runs_anywhere() -> None:
    """`kubectl apply -k deploy/k8s` needs no GPU, no secret and no volume that somebody must prepare."""
    assert k8s.rendered_text("") == k8s.rendered_text("cpu")
    kinds = {manifest["kind"] for manifest in render("")}
    assert not kinds & {"PersistentVolume", "PersistentVolumeClaim", "StatefulSet"}
    assert "nvidia.com" not in k8s.rendered_text("")
    assert "gateway-keys" not in k8s.rendered_text("")


def test_every_reference_leads_somewhere(overlay: list[Manifest]) -> None:
    """ConfigMaps, claims, accounts, selectors and scale targets that are named exist; everything is in one namespace."""
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in overlay} | MADE_BY_HAND
    labels = [workload["spec"]["template"]["metadata"]["labels"] for workload in workloads(overlay)]
    for workload in workloads(overlay):
        claims = {template["metadata"]["name"] for template in workload["spec"].get("volumeClaimTemplates", [])}
        pod = pod_of(workload)
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        assert claims.isdisjoint(volumes)
        for volume in volumes.values():
            for source in [volume, *volume.get("projected", {}).get("sources", [])]:
                if "configMap" in source:
                    assert ("ConfigMap", source["configMap"]["name"]) in there
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in there
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in there
        for box in pod["containers"]:
            assert {mount["name"] for mount in box["volumeMounts"]} <= set(volumes) | claims
            environment(overlay, box)
        if account := pod.get("serviceAccountName"):
            assert ("ServiceAccount", account) in there
    for manifest in overlay:
        if manifest["kind"] not in ("Namespace", "PersistentVolume"):
            assert manifest["metadata"].get("namespace") == "glm53", manifest["metadata"]
        if manifest["kind"] in ("Service", "PodDisruptionBudget"):
            wanted = manifest["spec"]["selector"]
            wanted = wanted.get("matchLabels", wanted)
            assert any(wanted.items() <= found.items() for found in labels), manifest["metadata"]["name"]
        if manifest["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = manifest["spec"]["scaleTargetRef"]
            assert "replicas" not in find(overlay, target["kind"], target["name"])["spec"], "apply would undo the autoscaler"


def test_settings_of_every_container_are_accepted(overlay: list[Manifest]) -> None:
    """The environment that a container gets loads: known names, values in range, addresses that fit each other's ports."""
    pods = {workload["metadata"]["name"]: pod_of(workload) for workload in workloads(overlay)}
    loaded = {}
    for service, settings in SETTINGS.items():
        box = container(pods["gateway" if service == "gateway" else "gpu-worker"], service)
        loaded[service] = settings.load(environment(overlay, box))
        assert box["command"] == ["python", "-m", "cli.doctor", "--for", service, "--"]
        assert box["args"] == ["python", "-m", f"services.{service.replace('-', '_')}"]
    gateway, worker, expert = loaded["gateway"], loaded["gpu-worker"], loaded["cpu-expert"]
    assert isinstance(gateway, GatewaySettings)
    assert isinstance(worker, GpuWorkerSettings)
    assert isinstance(expert, CpuExpertSettings)
    assert (worker.instance, worker.shm_dir) == (expert.instance, expert.shm_dir)
    ports = {name: port for pod in pods.values() for box in pod["containers"] for name, port in _ports(box).items()}
    assert worker.worker_address.endswith(f":{ports['grpc']}")
    assert worker.http_address.endswith(f":{ports['worker-http']}")
    assert expert.http_address.endswith(f":{ports['expert-http']}")
    service = find(overlay, "Service", "gpu-worker")
    assert addresses_of(gateway.worker_address) == [f"dns:///gpu-worker:{service['spec']['ports'][0]['port']}"]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)


def _ports(box: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in box.get("ports", [])}


def test_the_worker_pod_is_guaranteed_whole_cpus(overlay: list[Manifest]) -> None:
    """Requests equal limits in both containers and CPUs are whole: what the static CPU manager asks for."""
    for box in pod_of(k8s.worker(overlay))["containers"]:
        resources = box["resources"]
        assert resources["requests"] == resources["limits"]
        assert resources["limits"]["cpu"].isdecimal()
        assert set(resources["limits"]) >= {"cpu", "memory"}


def test_both_containers_share_the_records(overlay: list[Manifest]) -> None:
    """One tmpfs of the pod at /dev/shm of both, the same user in both, and no service links."""
    pod = pod_of(k8s.worker(overlay))
    assert [box["name"] for box in pod["containers"]] == ["gpu-worker", "cpu-expert"]
    (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    for box in pod["containers"]:
        assert {"name": "shm", "mountPath": "/dev/shm"} in box["volumeMounts"]
        assert "runAsUser" not in box["securityContext"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001


def test_the_records_fit(overlay: list[Manifest]) -> None:
    """The tmpfs holds the records of the checkpoint that the overlay serves, and the worker's memory limit holds the tmpfs."""
    pod = pod_of(k8s.worker(overlay))
    (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    tiny = Checkpoint(ROOT / "models/tiny/checkpoint")
    tiny_bytes = sum(cpu_arena.expert_shape(tiny, layer).record_bytes for layer in tiny.config.moe_layers) * tiny.config.n_routed_experts
    need = RECORD_BYTES if "GLM53_MODEL_DIR" in environment(overlay, container(pod, "gpu-worker")) else tiny_bytes
    assert in_bytes(shm["sizeLimit"]) >= need + shm_room.SLACK_BYTES
    assert in_bytes(container(pod, "gpu-worker")["resources"]["limits"]["memory"]) > in_bytes(shm["sizeLimit"])


def test_pods_are_hardened(overlay: list[Manifest]) -> None:
    """No root, no writable root file system, no capability, no token but Prometheus's, no service links, temporary files bounded."""
    for workload in workloads(overlay):
        pod, name = pod_of(workload), workload["metadata"]["name"]
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is (name == "prometheus")
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for box in pod["containers"]:
            assert box["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not box["image"].endswith(":latest")
            assert ":" in box["image"]
        for volume in pod["volumes"]:
            assert "hostPath" not in volume, "the namespace is restricted: host folders come through a claim"
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"]


def test_probes_fit_a_load_of_minutes(overlay: list[Manifest]) -> None:
    """The load has half an hour before anything is restarted; liveness never asks whether the worker is ready."""
    pod = pod_of(k8s.worker(overlay))
    worker = container(pod, "gpu-worker")
    startup = worker["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert startup["httpGet"]["path"] == "/health/ready"
    for box in [*pod["containers"], *pod_of(find(overlay, "Deployment", "gateway"))["containers"]]:
        assert box["livenessProbe"]["httpGet"]["path"] == "/health/live"
        assert box["livenessProbe"]["periodSeconds"] * box["livenessProbe"]["failureThreshold"] >= 60
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert box[probe]["timeoutSeconds"] < box[probe]["periodSeconds"] or probe == "startupProbe"
            assert box[probe]["httpGet"]["port"] in _ports(box)


def test_pods_have_time_to_drain(overlay: list[Manifest]) -> None:
    """The grace period covers preStop, the drain and the farewell; cpu-expert leaves after the worker."""
    gateway = pod_of(find(overlay, "Deployment", "gateway"))
    drain = float(environment(overlay, gateway["containers"][0])["GLM53_DRAIN_TIMEOUT_S"])
    assert gateway["terminationGracePeriodSeconds"] >= 5 + drain + 5
    pod = pod_of(k8s.worker(overlay))
    drain = float(environment(overlay, container(pod, "gpu-worker"))["GLM53_DRAIN_TIMEOUT_S"])
    assert pod["terminationGracePeriodSeconds"] >= drain + 15
    leaving = container(pod, "cpu-expert")["lifecycle"]["preStop"]["exec"]["command"]
    port = _ports(container(pod, "gpu-worker"))["worker-http"]
    assert f'("127.0.0.1", {port})' in leaving[-1]
    compile(leaving[-1], "preStop", "exec")


def test_one_gpu_never_holds_two_workers() -> None:
    """A single worker is recreated; with several, each pod asks for a GPU of its own."""
    assert k8s.worker(render("gpu"))["spec"]["strategy"] == {"type": "Recreate"}
    for name in ("gpu", "scale-out"):
        limits = container(pod_of(k8s.worker(render(name))), "gpu-worker")["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == "1"
        expert = container(pod_of(k8s.worker(render(name))), "cpu-expert")["resources"]["limits"]
        assert "nvidia.com/gpu" not in expert


def test_scale_out_is_the_same_pod_in_a_set() -> None:
    """A StatefulSet behind the headless service, each pod with a heat file of its own, otherwise the GPU overlay's pod."""
    one, many = k8s.worker(render("gpu")), k8s.worker(render("scale-out"))
    assert (one["kind"], many["kind"]) == ("Deployment", "StatefulSet")
    assert many["spec"]["serviceName"] == "gpu-worker"
    assert find(render("scale-out"), "Service", "gpu-worker")["spec"]["clusterIP"] == "None"
    assert pod_of(one)["containers"] == pod_of(many)["containers"]
    assert [template["metadata"]["name"] for template in many["spec"]["volumeClaimTemplates"]] == ["state"]
    (trigger,) = find(render("scale-out-keda"), "ScaledObject", "gpu-worker")["spec"]["triggers"]
    # What promtool's cases show to be a number at any time.
    cases = yaml.safe_load((ROOT / "deploy/prometheus/tests/rules_test.yml").read_text())["tests"]
    assert trigger["metadata"]["query"] in {case["expr"] for test in cases for case in test.get("promql_expr_test", [])}


# ---- who may talk to whom --------------------------------------------------------------------------------------------------------------

EXPECTED_TRAFFIC = {
    ("gateway", "gpu-worker", 30051),
    ("gateway", "redis", 6379),
    ("prometheus", "gateway", 30000),
    ("prometheus", "gpu-worker", 30061),
    ("prometheus", "gpu-worker", 30062),
    ("grafana", "prometheus", 9090),
}


def test_only_the_expected_traffic_is_allowed() -> None:
    """Computed from the policies: a connection needs an egress rule of its sender and an ingress rule of its receiver."""
    manifests = render("cpu")
    policies = [manifest["spec"] for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in policies, "nothing is denied by default"
    pods = {workload["metadata"]["name"]: workload["spec"]["template"]["metadata"]["labels"] for workload in workloads(manifests)}
    ports = {name: _all_ports(pod_of(find(manifests, "Deployment", name))) for name in pods}
    allowed = {
        (sender, receiver, port)
        for sender in pods
        for receiver in pods
        for port in ports[receiver]
        if sender != receiver
        and _permits(policies, "egress", pods[sender], pods[receiver], port)
        and _permits(policies, "ingress", pods[receiver], pods[sender], port)
    }
    assert allowed == EXPECTED_TRAFFIC


def _all_ports(pod: Manifest) -> set[int]:
    return {port for box in pod["containers"] for port in _ports(box).values()}


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _permits(policies: list[Manifest], way: str, own: dict[str, str], other: dict[str, str], port: int) -> bool:
    """True when a policy of the pod `own` lets this port through to or from the pod `other` of the same namespace."""
    peers = {"egress": "to", "ingress": "from"}[way]
    for policy in policies:
        if not _selects(policy["podSelector"], own):
            continue
        for rule in policy.get(way, []):
            named = rule.get("ports")
            through = named is None or any(entry["port"] == port for entry in named)
            own_namespace = [peer["podSelector"] for peer in rule.get(peers, []) if "namespaceSelector" not in peer]
            known = peers not in rule or any(_selects(selector, other) for selector in own_namespace)
            if through and known:
                return True
    return False


# ---- monitoring ------------------------------------------------------------------------------------------------------------------------


def test_rules_and_dashboards_are_those_of_compose() -> None:
    """The ConfigMaps hold the files of deploy/prometheus and deploy/grafana, all of them."""
    maps = {name: find_map(name)["data"] for name in ("prometheus-rules", "grafana-dashboards", "grafana-datasources", "grafana-providers")}
    folders = {
        "prometheus-rules": "prometheus/rules",
        "grafana-dashboards": "grafana/dashboards",
        "grafana-datasources": "grafana/provisioning/datasources",
        "grafana-providers": "grafana/provisioning/dashboards",
    }
    for name, folder in folders.items():
        files = {path.name: path.read_text() for path in (ROOT / "deploy" / folder).iterdir()}
        assert maps[name] == files


def test_prometheus_gets_every_rule_file() -> None:
    """The pod has the configuration and, where that looks for them, all the rules."""
    pod = pod_of(find(render("cpu"), "Deployment", "prometheus"))
    (config,) = [volume for volume in pod["volumes"] if volume["name"] == "config"]
    items = [item for source in config["projected"]["sources"] for item in source["configMap"].get("items", [])]
    assert {item["path"] for item in items} == {f"rules/{path.name}" for path in (ROOT / "deploy/prometheus/rules").iterdir()}
    assert all(item["path"] == f"rules/{item['key']}" for item in items)


def find_map(name: str) -> Manifest:
    """The generated ConfigMap whose name begins so."""
    (found,) = [item for item in render("cpu") if item["kind"] == "ConfigMap" and item["metadata"]["name"].startswith(name + "-")]
    return found


def test_prometheus_finds_the_ports_that_pods_declare() -> None:
    """Every job that keeps pods by name and port keeps exactly one container port."""
    config = yaml.safe_load((K8S / "base/prometheus/prometheus.yml").read_text())
    declared = {
        f"{workload['metadata']['name']};{name}"
        for workload in workloads(render("cpu"))
        for box in pod_of(workload)["containers"]
        for name in _ports(box)
    }
    kept = {job["job_name"]: job["relabel_configs"][0]["regex"] for job in config["scrape_configs"] if "kubernetes_sd_configs" in job}
    assert kept == {"gateway": "gateway;http", "gpu-worker": "gpu-worker;worker-http", "cpu-expert": "gpu-worker;expert-http"}
    assert set(kept.values()) <= declared


def test_the_operator_s_monitors_are_a_component(tmp_path: Path) -> None:
    """An overlay that adds the component gets monitors whose ports and labels are those of the services."""
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    # kustomize takes relative paths only.
    up = "../" * len(overlay.parts[1:])
    path = f"{up}{K8S.relative_to('/')}"
    (overlay / "kustomization.yaml").write_text(f"resources: ['{path}/overlays/cpu']\ncomponents: ['{path}/components/service-monitor']\n")
    done = tool("kubectl", "kustomize", overlay)
    assert done.returncode == 0, done.stderr
    manifests = [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]
    monitor, pods = find(manifests, "ServiceMonitor", "gateway"), find(manifests, "PodMonitor", "gpu-worker")
    service = find(manifests, "Service", "gateway")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {entry["port"] for entry in monitor["spec"]["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    declared = {name for box in pod_of(k8s.worker(manifests))["containers"] for name in _ports(box)}
    assert {entry["port"] for entry in pods["spec"]["podMetricsEndpoints"]} <= declared


def test_the_overlay_of_the_install_page_names_every_image(tmp_path: Path) -> None:
    """What docs/install.md tells people to write renders, and after it no image is one that only this repository's name stands for."""
    (text,) = re.findall(r"```yaml\n(# kustomization.yaml\n.*?)```", (ROOT / "docs/install.md").read_text(), re.DOTALL)
    shutil.copytree(ROOT / "deploy", tmp_path / "glm53-offload" / "deploy")
    assert "overlays/gpu" in text
    for overlay, worker in (("gpu", "gpu-worker"), ("cpu", "gpu-worker-cpu"), ("scale-out", "gpu-worker")):
        (tmp_path / "kustomization.yaml").write_text(text.replace("overlays/gpu", f"overlays/{overlay}"))
        done = tool("kubectl", "kustomize", tmp_path)
        assert done.returncode == 0, done.stderr
        manifests = [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]
        ours = {"gateway": "gateway", "gpu-worker": worker, "cpu-expert": "cpu-expert"}
        boxes = [box for workload in workloads(manifests) for box in pod_of(workload)["containers"]]
        found = {box["name"]: box["image"] for box in boxes if box["name"] in ours}
        assert found == {name: f"registry.example.com/glm53/{image}@sha256:..." for name, image in ours.items()}
