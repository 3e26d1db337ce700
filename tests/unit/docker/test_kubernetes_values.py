"""Values for the Helm chart: what the chart makes of them is of Kubernetes' own form, and the parts agree.

There is neither a cluster nor the chart here. Pods and the job are put together as the chart's templates do it (release
1.22.0), as far as our values go into them, and held against Kubernetes' own description of objects.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from croniter import croniter

from coral_tasks.tasks.local_airflow import PROJECT

DOCKER = PROJECT / "docker"
VALUES = yaml.safe_load((DOCKER / "kubernetes-values.yaml").read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "kubernetes" / "objects.schema.json").read_text("utf-8"))
IMAGE = f"{VALUES['defaultAirflowRepository']}:{VALUES['defaultAirflowTag']}"
CLEANUP_KEYS = {
    "enabled", "schedule", "command", "args", "env", "applyCustomEnv", "resources", "labels", "jobAnnotations",
    "podAnnotations", "nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "priorityClassName",
    "securityContexts", "containerLifecycleHooks", "serviceAccount", "failedJobsHistoryLimit",
    "successfulJobsHistoryLimit", "ttlSecondsAfterFinished", "retentionDays",
}  # fmt: skip
"""Of the chart's section databaseCleanup; it refuses any other."""


def container(name: str, **more: Any) -> dict[str, Any]:
    """One of the chart's containers with what goes into each of them."""
    made = {"name": name, "image": IMAGE, "env": VALUES["env"], "volumeMounts": VALUES["volumeMounts"]}
    return made | {"securityContext": VALUES["securityContexts"]["container"]} | more


def pod_spec(containers: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The specification of a pod with what goes into each of them."""
    return {
        "containers": containers,
        "volumes": VALUES["volumes"],
        "securityContext": VALUES["securityContexts"]["pod"],
        "restartPolicy": "Never",
    } | more


def cron_job() -> dict[str, Any]:
    """The job that cleans Airflow's database."""
    part = VALUES["databaseCleanup"]
    spec = pod_spec([container("database-cleanup", args=part["args"], resources=part["resources"])])
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "coral-database-cleanup"},
        "spec": {
            "schedule": part["schedule"],
            "concurrencyPolicy": "Forbid",
            "failedJobsHistoryLimit": part["failedJobsHistoryLimit"],
            "successfulJobsHistoryLimit": part["successfulJobsHistoryLimit"],
            "jobTemplate": {"spec": {"backoffLimit": 1, "template": {"spec": spec}}},
        },
    }


def pods() -> dict[str, dict[str, Any]]:
    """A task's pod and the api-server's, by name."""
    workers, server = VALUES["workers"], VALUES["apiServer"]
    task = pod_spec([container("base", resources=workers["resources"])], initContainers=workers["extraInitContainers"])
    specs = {"task": task, "api-server": pod_spec([container("api-server"), *server["extraContainers"]])}
    return {
        name: {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        for name, spec in specs.items()
    }


def check(item: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError where an object is not of Kubernetes' form."""
    names = {"CronJob": "api.batch.v1.CronJob", "Pod": "api.core.v1.Pod"}
    schema = {**SCHEMA, "$ref": f"#/$defs/{names[item['kind']]}"}
    jsonschema.Draft202012Validator(schema).validate(item)


@pytest.mark.parametrize("item", [cron_job(), *pods().values()], ids=lambda item: item["metadata"]["name"])
def test_objects_are_of_kubernetes_form(item) -> None:
    """Every field exists and is of its type, and the description would refuse one that is not."""
    check(item)
    for path, value in (("resource", {}), ("args", "one text"), ("env", [{"value": "no name"}])):
        spoiled = copy.deepcopy(item)
        spec = spoiled["spec"] if item["kind"] == "Pod" else spoiled["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        spec["containers"][-1][path] = value
        with pytest.raises(jsonschema.ValidationError):
            check(spoiled)


def test_the_job_does_what_the_service_of_the_compose_file_does() -> None:
    """The same script with the same days, once a day; it lies in the image where the job calls it."""
    part = VALUES["databaseCleanup"]
    assert part["enabled"] is True
    assert set(part) <= CLEANUP_KEYS
    script, days, *tables = part["args"]
    (command,) = [word for word in COMPOSE["services"]["tidy"]["command"] if "clean-database" in word]
    assert f"{script} ${{CORAL_DATABASE_DAYS:-{days}}}; sleep 86400;" in command
    lines = (DOCKER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    (copied,) = [line for line in lines if "docker/clean-database" in line]
    assert copied.split()[-1] + "clean-database" == script
    assert (DOCKER / "clean-database").stat().st_mode & 0o111 == 0o111
    assert tables == ["session"]
    times = croniter(part["schedule"], 0)
    first, second = times.get_next(), times.get_next()
    assert second - first == 86400


def test_whatever_is_mounted_or_named_exists() -> None:
    """Mounts name volumes of the pod; secrets and config maps are told to whoever installs, with their keys."""
    volumes = {one["name"] for one in VALUES["volumes"]}
    for pod in pods().values():
        for one in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes, one["name"]
            assert one["image"] == IMAGE
    text = (PROJECT / "docs" / "deployment.md").read_text(encoding="utf-8")
    named = [value for name, value in VALUES.items() if name.endswith("SecretName")]
    named += [VALUES["data"]["metadataSecretName"]]
    named += [one["secret"]["secretName"] for one in VALUES["volumes"] if "secret" in one]
    named += [one["configMap"]["name"] for one in VALUES["volumes"] if "configMap" in one]
    assert len(named) == 6
    for name in named:
        assert re.search(rf"\b{name}\b", text), name
    for key in ("connection", "fernet-key", "jwt-secret", "api-secret-key"):
        assert f"--from-literal={key}=" in text or f"--from-file={key}" in text, key


def test_the_page_reads_what_tasks_write() -> None:
    """Beside the api-server files are fetched into its own home, from the place where tasks put them."""
    env = {one["name"]: one["value"] for one in VALUES["env"]}
    (pull,) = VALUES["apiServer"]["extraContainers"]
    own = {one["name"]: one["value"] for one in pull["env"]}
    assert own == {name: env[name] for name in ("CORAL_HOME", "CORAL_SHARED")}
    assert "coral pull" in pull["args"][-1]
    assert {"name": "coral-home", "mountPath": env["CORAL_HOME"]} in pull["volumeMounts"]
    assert VALUES["apiServer"]["serviceAccount"] == VALUES["workers"]["serviceAccount"]


def test_people_log_in_with_the_charts_auth_manager_and_nobody_by_default() -> None:
    """Its provider is in the image that the values ask for; the chart's user admin, password admin, is not made."""
    manager = VALUES["config"]["core"]["auth_manager"]
    provider = "-".join(["apache", "airflow", "providers", manager.split(".")[2]])
    wanted = (DOCKER / "requirements-kubernetes.txt").read_text(encoding="utf-8")
    assert re.search(rf"^{provider}==\d", wanted, re.MULTILINE)
    assert VALUES["createUserJob"] == {"defaultUser": {"enabled": False}}
