"""Images and stacks: valid, pinned, unprivileged, without secrets, and in step with the code and the lock."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from coral_tasks.settings import Settings
from coral_tasks.tasks.local_airflow import PROJECT

DOCKER = PROJECT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((DOCKER / "kubernetes-values.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
OURS = [name for name in SERVICES if name not in {"postgres", "redis"}]
DOCKERFILES = ("Dockerfile", "Dockerfile.agent")


def _airflow_options() -> dict[str, dict]:
    """Options of this Airflow and its Celery provider by section, from their own files: importing them makes a home."""
    found = importlib.util.find_spec("airflow")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    core = yaml.safe_load((folder / "config_templates" / "config.yml").read_text(encoding="utf-8"))
    celery = runpy.run_path(str(folder / "providers" / "celery" / "get_provider_info.py"))["get_provider_info"]()
    return {name: part["options"] for name, part in {**core, **celery["config"]}.items()}


def _instructions(name: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with continued lines joined."""
    text = (DOCKER / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines()]  # type: ignore[misc]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_are_pinned_and_end_as_an_ordinary_user(name) -> None:
    """Base images carry a full version, the last user is not root, and there is a health check."""
    steps = _instructions(name)
    bases = [rest.split()[0] for word, rest in steps if word == "FROM"]
    assert bases
    assert all(re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+[a-z-]*", base) for base in bases)
    assert [rest for word, rest in steps if word == "USER"][-1] == "coral"
    assert any(word == "HEALTHCHECK" for word, _ in steps)
    assert not any(word == "ADD" for word, _ in steps)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_copied_file_exists_and_reaches_the_builder(name) -> None:
    """What the image copies is in the repository and not kept out by .dockerignore."""
    allowed = {
        line[1:] for line in (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"
    }
    sources = [
        source
        for word, rest in _instructions(name)
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (PROJECT / source).exists(), source
        assert source.split("/")[0] in allowed, source


def test_the_agents_image_has_the_vllm_that_the_project_names() -> None:
    """One version of vLLM in pyproject.toml and in the image."""
    extra = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (wanted,) = extra["vllm"]
    assert ("FROM", f"vllm/vllm-openai:v{wanted.removeprefix('vllm==')}") in _instructions("Dockerfile.agent")


def test_the_worker_image_has_no_vllm_and_no_test_tools() -> None:
    """Every tool of the extra "dev" is kept out, and nothing that the other extras need."""
    from packaging.requirements import Requirement

    (step,) = [rest for word, rest in _instructions("Dockerfile") if word == "RUN" and "grep -viE" in rest]
    pattern = re.search(r"grep -viE '([^']+)'", step)
    assert pattern is not None
    out = re.compile(pattern.group(1), re.IGNORECASE)
    locked = (DOCKER / "requirements.lock").read_text(encoding="utf-8").splitlines()
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    dev = {Requirement(line).name for line in extras["dev"]}
    dropped = {line.split("==")[0] for line in locked if out.match(line)}
    assert dev <= dropped
    assert not dropped & {Requirement(line).name for name in extras if name != "dev" for line in extras[name]}
    assert not any(line.startswith("vllm") for line in locked)


def test_the_stack_has_every_part() -> None:
    """PostgreSQL, Redis, Airflow's components, two workers, three agents."""
    wanted = {"postgres", "redis", "api-server", "scheduler", "dag-processor", "triggerer", "worker-1", "worker-2"}
    assert wanted | {"agent-1", "agent-2", "agent-3"} <= set(SERVICES)


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_restrained(name) -> None:
    """Pinned image, no new privileges, health check, restart policy, and no port but on loopback."""
    service = SERVICES[name]
    assert re.fullmatch(r"[a-z-]+:\d+\.\d+(\.\d+)?(-[a-z]+)?", service["image"])
    assert "no-new-privileges:true" in service["security_opt"]
    assert "healthcheck" in service
    assert service["restart"] in {"unless-stopped", "no"}
    assert all(re.match(r"127\.0\.0\.1:", port) for port in service.get("ports", ()))
    assert not service.get("privileged")
    assert "root" not in str(service.get("user", ""))
    assert name in OURS or service["user"] in {"postgres", "redis"}


def test_names_that_services_use_are_declared() -> None:
    """Volumes, secrets, networks and dependencies exist."""
    for name, service in SERVICES.items():
        named = [volume.split(":")[0] for volume in service.get("volumes", ()) if volume[0] not in "./"]
        assert set(named) <= set(COMPOSE["volumes"]), name
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"]), name
        assert set(service["networks"]) <= set(COMPOSE["networks"]), name
        assert set(service.get("depends_on", ())) <= set(SERVICES), name
        for dependency, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "test" in SERVICES[dependency]["healthcheck"]


def test_every_setting_of_the_stacks_exists() -> None:
    """A mistyped name would be ignored silently; a secret's command works for Airflow's secret options only."""
    options = _airflow_options()
    known = {f"CORAL_{field.upper()}" for field in Settings.model_fields}
    names = {name for one in OURS for name in SERVICES[one].get("environment", ())} | {
        entry["name"] for entry in VALUES["env"]
    }
    for name in names:
        if not name.startswith("AIRFLOW__"):
            assert name in known, name
            continue
        section, option = name.removeprefix("AIRFLOW__").lower().split("__")
        if option.endswith("_cmd"):
            assert options[section][option.removesuffix("_cmd")]["sensitive"], name
        elif section != "celery_broker_transport_options":
            assert option in options[section], name
    for section, values in VALUES["config"].items():
        if section != "kubernetes_executor":  # its provider is not installed here
            assert set(values) <= set(options[section]), section


def test_redis_never_hands_out_a_running_task() -> None:
    """The visibility timeout is well above the longest time limit of any task."""
    from datetime import timedelta

    source = "\n".join(path.read_text(encoding="utf-8") for path in (PROJECT / "dags").glob("*.py"))
    hours = [float(text) for text in re.findall(r"timedelta\(hours=([\d.]+)\)", source)]
    longest = max(timedelta(hours=hour) for hour in [*hours, 0.5])
    for name in ("scheduler", "worker-1", "worker-2"):
        seconds = int(SERVICES[name]["environment"]["AIRFLOW__CELERY_BROKER_TRANSPORT_OPTIONS__VISIBILITY_TIMEOUT"])
        assert timedelta(seconds=seconds) >= 2 * longest


def test_no_server_of_logs_is_started() -> None:
    """Airflow's log servers listen on every interface, whatever is configured: each component is told to leave it."""
    for name, service in SERVICES.items():
        words = [str(word) for word in service.get("command", ())]
        if name in {"scheduler", "triggerer"} or "celery" in words:
            assert "--skip-serve-logs" in words, name


def test_no_secret_is_in_the_files() -> None:
    """Passwords come from secret files; the values for Kubernetes only name secrets."""
    for path in DOCKER.iterdir():
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not re.search(
                r"(password|passwd|secret_key|token)\s*[:=]\s*['\"]?[A-Za-z0-9+/]{12,}", text, re.IGNORECASE
            ), path
            assert not re.search(r"AKIA[0-9A-Z]{16}|-----BEGIN", text), path
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|SECRET|TOKEN|KEY", name) or name.endswith(("_FILE", "_CMD")), (name, value)


def test_values_for_kubernetes_name_the_same_image_and_airflow() -> None:
    """Executor, image and version agree with the compose file and the lock."""
    locked = (DOCKER / "requirements.lock").read_text(encoding="utf-8")
    assert VALUES["executor"] == "KubernetesExecutor"
    assert f"apache-airflow=={VALUES['airflowVersion']}\n" in locked
    assert f"{VALUES['defaultAirflowRepository']}:{VALUES['defaultAirflowTag']}" == SERVICES["scheduler"]["image"]
    assert VALUES["securityContexts"]["pod"]["runAsNonRoot"] is True
    assert {entry["name"]: entry["value"] for entry in VALUES["env"]}["CORAL_SHARED"].startswith("s3://")


def test_secrets_are_made_once_and_kept_private(tmp_path) -> None:
    """A second call changes nothing; nobody but owner and the containers' group may read; Compose sees, whoever calls
    it, that they are there; addresses hold them.
    """
    for name in ("make-secrets", "secret-url"):
        shutil.copy2(DOCKER / name, tmp_path / name)
    for _ in range(2):
        subprocess.run([tmp_path / "make-secrets"], check=True, capture_output=True)
    files = {path.name: path.read_text(encoding="ascii") for path in (tmp_path / "secrets").iterdir()}
    subprocess.run([tmp_path / "make-secrets"], check=True, capture_output=True)
    assert files == {path.name: path.read_text(encoding="ascii") for path in (tmp_path / "secrets").iterdir()}
    assert set(files) == set(COMPOSE["secrets"])
    assert all(len(text) >= 43 for text in files.values())
    assert all(
        stat.S_IMODE(path.stat().st_mode) & 0o337 == 0 or os.geteuid() for path in (tmp_path / "secrets").iterdir()
    )
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o711
    environment = {**os.environ, "CORAL_SECRETS": str(tmp_path / "secrets")}

    def url(kind: str) -> str:
        done = subprocess.run(
            [tmp_path / "secret-url", kind], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert url("database") == f"postgresql+psycopg2://coral:{files['postgres_password']}@postgres:5432/airflow"
    assert url("results") == "db+" + url("database")
    assert url("broker") == f"redis://:{files['redis_password']}@redis:6379/0"
    assert (url("jwt"), url("fernet")) == (files["jwt_secret"], files["fernet_key"])
    from cryptography.fernet import Fernet

    Fernet(url("fernet"))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """What the service ``prepare`` leaves in home and in the agents' volumes."""
    environment = {**os.environ, "CORAL_HOME": str(tmp_path / "home"), "CORAL_SETUP": "core"}
    for _ in range(2):
        words = [sys.executable, str(DOCKER / "prepare.py"), str(tmp_path / "volumes")]
        subprocess.run(words, env=environment, check=True, capture_output=True)
    return tmp_path


def test_each_agent_receives_its_own_key_and_no_other(prepared) -> None:
    """Names, addresses and keys are those of compose.yaml; secret keys are private to their owner."""
    from coral_tasks.agent.config import read_agent_config
    from coral_tasks.dispatch.inventory import read_endpoints

    endpoints = read_endpoints(prepared / "home" / "agents.toml")
    for number in (1, 2, 3):
        volume = prepared / "volumes" / f"agent-{number}"
        config = read_agent_config(volume / "agent.toml")
        assert config.advertise == SERVICES[f"agent-{number}"]["hostname"]
        assert endpoints[config.name] == f"tcp://{config.advertise}:7000"
        secrets = [path for path in (volume / "keys").iterdir() if path.suffix == ".key"]
        assert [path.name for path in secrets] == [f"agent-{config.name}.key"]
        assert stat.S_IMODE(secrets[0].stat().st_mode) == 0o600
        assert (volume / "keys" / "controller-controller.pub").is_file()
        assert str(config.state).startswith("/var/lib/coral/")


def test_the_health_check_tells_a_listening_agent_from_a_dead_one(tmp_path) -> None:
    """It connects where the configuration says, also by the name of a network interface."""
    import socket

    config = tmp_path / "agent.toml"
    words = [sys.executable, str(DOCKER / "agent-health.py"), str(config)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config.write_text(f'bind = "tcp://lo:{port}"\n', encoding="utf-8")
        assert subprocess.run(words, check=False, capture_output=True).returncode == 0
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"tcp://lo:{port}" in done.stderr


def test_the_agent_as_a_service_finds_its_programs() -> None:
    """It starts "coral" and "vllm" by their names: both environments, as the text makes them, are in its path."""
    unit = (DOCKER / "coral-agent.service").read_text(encoding="utf-8")
    options = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and line[0] != "#")
    folders = options["Environment"].removeprefix("PATH=").split(":")
    assert Path(options["ExecStart"].split()[0]).parent == Path(folders[0])
    text = (PROJECT / "docs" / "deployment.md").read_text(encoding="utf-8")
    for folder in folders[:2]:
        assert f"-m venv {Path(folder).parent} " in text


def _compose(folder: Path) -> list[str]:
    """Compose's own command line on a copy of ``docker/``; skips where neither version of Compose is installed."""
    shutil.copytree(DOCKER, folder)
    for words in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(words[0])
            and subprocess.run([*words, "version"], capture_output=True, check=False).returncode == 0
        ):
            break
    else:
        pytest.skip("neither docker compose nor docker-compose on this machine")
    if words == ["docker-compose"]:  # 1.29, Debian's, is older than the top-level name
        file = folder / "compose.yaml"
        kept = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("name:")]
        file.write_text("\n".join(kept), encoding="utf-8")
    return [*words, "-f", str(folder / "compose.yaml")]


def test_docker_compose_accepts_the_file(tmp_path) -> None:
    """Compose itself reads the file as it is meant; every service waits for one that exists."""
    words = _compose(tmp_path / "docker")
    done = subprocess.run([*words, "config"], capture_output=True, text=True, check=True)
    read = yaml.safe_load(done.stdout)["services"]
    assert set(read) >= set(SERVICES) - {"agent-gpu"}
    assert all(set(one.get("depends_on", {})) <= set(read) for one in read.values())
