"""The files under compose/ against the schemas and tools that will read them, and against each
other where two must say the same."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafter_service.config import Config as DrafterConfig
from draftwire.config import load
from verifier_service.config import VerifierConfig

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
SCRIPTS = Path(sys.executable).parent
OVERLAYS = ("demo", "h100")
# Kinds of operators whose schemas the validator does not have; their form is checked below.
FOREIGN = {"ServiceMonitor"}


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{SCRIPTS}:{Path('/usr/bin')}:{Path('/usr/local/bin')}")
    found = found or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def laid_over(*names: str) -> dict[str, Any]:
    """Services as `docker compose -f … -f …` sees them: mappings merge, commands are replaced."""
    services: dict[str, Any] = {}
    for name in names:
        for service, content in yaml.safe_load((COMPOSE / name).read_text())["services"].items():
            merged = services.setdefault(service, {})
            for key, value in content.items():
                if isinstance(value, dict) and isinstance(merged.get(key), dict):
                    merged[key] = merged[key] | value
                elif isinstance(value, list) and key in ("secrets", "volumes"):
                    merged[key] = [*merged.get(key, []), *value]
                else:
                    merged[key] = value
    return services


def substituted(value: str, **chosen: str) -> str:
    """`${NAME:-default}` and `${NAME:?text}` as compose fills them in."""

    def fill(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2) or ""
        return chosen.get(name, default.removeprefix(":-"))

    return re.sub(r"\$\{(\w+)((?::-|:\?)[^}]*)?\}", fill, value)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml", "compose.tls.yaml"])
def test_a_compose_file_has_the_form_that_compose_asks_for(name: str) -> None:
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", COMPOSE / name)


def test_the_dockerfile_is_clean() -> None:
    run(tool("hadolint"), "--config", COMPOSE / ".hadolint.yaml", COMPOSE / "Dockerfile")


def test_images_install_from_the_lock_of_ci_and_run_as_nobody() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    assert "COPY constraints.txt /constraints.txt" in text
    assert "PIP_CONSTRAINT=/constraints.txt" in text
    for stage in re.split(r"^FROM ", text, flags=re.M)[1:]:
        if "pip install" in stage:
            assert stage.startswith(("env ", "env\n"))  # the stage with the lock
    assert "-c constraints.txt" in (ROOT / "Makefile").read_text()
    assert re.findall(r"^USER (\S+)", text, flags=re.M)[-1] == "10001:10001"


def test_the_builder_gets_all_that_the_wheel_is_made_of() -> None:
    lines = (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    wanted = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "constraints.txt"}
    wanted |= {"protos", "kernels", "client", "drafter_service", "verifier_service"}
    assert let_in == wanted
    assert all((ROOT / name).exists() for name in wanted)


@pytest.mark.parametrize(
    "files",
    [
        ("compose.yaml",),
        ("compose.yaml", "compose.gpu.yaml"),
        ("compose.yaml", "compose.tls.yaml"),
    ],
    ids=lambda files: files[-1],
)
def test_the_services_take_their_commands_and_variables(files: tuple[str, ...]) -> None:
    services = laid_over(*files)
    chosen = {"MODEL": "Qwen/Qwen3-4B", "CHECKPOINT": "z-lab/Qwen3-4B-DFlash-b16"}
    if files == ("compose.yaml",):
        chosen = {}
    for name, cls in (("verifier", VerifierConfig), ("drafter", DrafterConfig)):
        program, *arguments = services[name]["command"]
        assert program == f"draftwire-{name}"
        environment = {
            key: substituted(str(value), **chosen)
            for key, value in services[name]["environment"].items()
            if key.startswith("DRAFTWIRE_")
        }
        config = load(cls, arguments, environment, program)
        grace = services[name]["stop_grace_period"]
        assert int(grace.removesuffix("s")) > config.drain_grace_s


def test_each_secret_and_volume_that_a_service_uses_is_defined() -> None:
    for extra in ("compose.gpu.yaml", "compose.tls.yaml"):
        files = [yaml.safe_load((COMPOSE / n).read_text()) for n in ("compose.yaml", extra)]
        defined = {name for file in files for name in file.get("secrets", {})}
        for service in laid_over("compose.yaml", extra).values():
            assert set(service.get("secrets", ())) <= defined
    for volume in re.findall(r"^\s+- \.(/\S+?):", (COMPOSE / "compose.yaml").read_text(), re.M):
        assert (COMPOSE / volume.lstrip("/")).exists(), volume


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kubectl, kustomize = shutil.which("kubectl"), shutil.which("kustomize")
    command = [kubectl, "kustomize"] if kubectl else [kustomize, "build"]
    if command[0] is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    folder = tmp_path_factory.mktemp("rendered")
    files = {name: folder / f"{name}.yaml" for name in OVERLAYS}
    for name, file in files.items():
        file.write_text(run(*command, COMPOSE / "kubernetes/overlays" / name))  # type: ignore[arg-type]
    return files


def objects(file: Path, kind: str) -> dict[str, Any]:
    return {
        o["metadata"]["name"]: o for o in yaml.safe_load_all(file.read_text()) if o["kind"] == kind
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_have_the_form_that_kubernetes_asks_for(
    rendered: dict[str, Path], overlay: str, tmp_path: Path
) -> None:
    import kubernetes_validate

    for item in yaml.safe_load_all(rendered[overlay].read_text()):
        if item["kind"] not in FOREIGN:
            kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_what_a_rollout_needs(rendered: dict[str, Path], overlay: str) -> None:
    budgets = objects(rendered[overlay], "PodDisruptionBudget")
    services = objects(rendered[overlay], "Service")
    for name, deployment in objects(rendered[overlay], "Deployment").items():
        template = deployment["spec"]["template"]
        pod, labels = template["spec"], template["metadata"]["labels"]
        cls = VerifierConfig if name == "verifier" else DrafterConfig
        first = next(c for c in pod["containers"] if c["name"] == name)
        program, *arguments = first["args"]
        environment = {e["name"]: e["value"] for e in first["env"]}
        config = load(cls, arguments, environment, program)
        assert pod["terminationGracePeriodSeconds"] > config.drain_grace_s
        assert first["startupProbe"]["grpc"]["port"] == int(config.listen.rpartition(":")[2])
        assert first["readinessProbe"]["grpc"]["service"] == f"draftwire.v1.{name.capitalize()}"
        assert services[name]["spec"]["clusterIP"] == "None"
        assert services[name]["spec"]["selector"].items() <= labels.items()
        assert budgets[name]["spec"]["selector"]["matchLabels"].items() <= labels.items()
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts <= {volume["name"] for volume in pod["volumes"]}
            if container["name"] != name:  # the drafter beside a verifier
                program, *arguments = container["args"]
                environment = {e["name"]: e["value"] for e in container["env"]}
                load(DrafterConfig, arguments, environment, program)


def test_the_autoscaler_goes_by_a_metric_that_drafters_have(rendered: dict[str, Path]) -> None:
    from draftwire.metric_table import TABLE

    scaler = objects(rendered["h100"], "HorizontalPodAutoscaler")["drafter"]
    names = {m["pods"]["metric"]["name"] for m in scaler["spec"]["metrics"]}
    assert names <= TABLE.keys()


def test_monitors_ask_a_port_that_the_service_has(rendered: dict[str, Path]) -> None:
    services = objects(rendered["h100"], "Service")
    for name, monitor in objects(rendered["h100"], "ServiceMonitor").items():
        ports = {port["name"] for port in services[name]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def test_systemd_takes_the_units() -> None:
    analyze = tool("systemd-analyze")
    for unit in sorted((COMPOSE / "systemd").glob("*.service")):
        done = subprocess.run(
            [analyze, "verify", unit], capture_output=True, text=True, check=False
        )
        # The program is not installed where the tests run; all else must be well.
        complaints = [line for line in done.stderr.splitlines() if "is not executable" not in line]
        assert not complaints, complaints
        text = unit.read_text()
        limit = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M).group(1))  # type: ignore[union-attr]
        assert limit > VerifierConfig().drain_grace_s


def test_envoy_takes_its_configuration() -> None:
    envoy = tool("envoy")
    run(envoy, "--mode", "validate", "--config-path", COMPOSE / "envoy/envoy.yaml")
