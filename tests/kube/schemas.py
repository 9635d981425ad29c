"""What a Kubernetes API server would refuse: objects are held against the schemas of Kubernetes, and of KubeRay.

The schemas of Kubernetes are those that the package kubernetes-validate has. KubeRay's CRDs are in no package: those of
a checkout are read where EVENKEEL_TEST_KUBERAY_CRDS names its folder (helm-chart/kuberay-operator/crds), and RAY_SPEC
has the fields that Evenkeel writes, as KubeRay's documentation describes them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES_VERSION = "1.34"
CRDS = os.environ.get("EVENKEEL_TEST_KUBERAY_CRDS", "")

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
_POD: dict[str, Any] = {"type": "object", "required": ["spec"]}


def _object(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


_HEAD = {"rayStartParams": _TEXTS, "serviceType": _TEXT, "template": _POD}
_GROUP = {"groupName": _TEXT, "replicas": _COUNT, "minReplicas": _COUNT, "maxReplicas": _COUNT}
CLUSTER = _object(
    ("headGroupSpec",),
    rayVersion=_TEXT,
    authOptions=_object(mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling={"type": "boolean"},
    headGroupSpec=_object(("template",), **_HEAD),
    workerGroupSpecs={
        "type": "array",
        "items": _object(
            ("groupName", "minReplicas", "maxReplicas", "template"), rayStartParams=_TEXTS, template=_POD, **_GROUP
        ),
    },
)
RAY_SPEC = {
    "RayCluster": CLUSTER,
    "RayJob": _object(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=_TEXT,
        jobId=_TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        submitterConfig=_object(backoffLimit=_COUNT),
        submitterPodTemplate=_POD,
        backoffLimit=_COUNT,
        suspend={"type": "boolean"},
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=_COUNT,
        rayClusterSpec=CLUSTER,
    ),
}


class Invalid(Exception):
    """What is wrong with an object, and where."""


def validate(document: dict[str, Any], crds: str = CRDS) -> None:
    """Check an object.

    Raises:
        Invalid: It is not one that the schemas allow.
    """
    if not document.get("apiVersion", "").startswith("ray.io/"):
        _against_kubernetes(document)
        return
    schema = {"type": "object", "properties": {"spec": RAY_SPEC[document["kind"]]}, "required": ["spec"]}
    _against(schema, document)
    if crds:
        _against(crd_schema(crds, document["kind"]), document)
    for template in pod_templates(document["spec"]):
        metadata = {"name": "pod", **template.get("metadata", {})}
        _against_kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


def pod_templates(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod templates of a RayJob or RayCluster."""
    cluster = spec.get("rayClusterSpec", spec)
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    return [group["template"] for group in groups] + [spec[key] for key in ("submitterPodTemplate",) if key in spec]


@functools.cache
def crd_schema(folder: str, kind: str) -> dict[str, Any]:
    """Return the schema of a CRD of version v1, in which fields that it does not name are refused."""
    text = (Path(folder) / f"ray.io_{kind.lower()}s.yaml").read_text("utf-8")
    document = yaml.load(text, Loader=yaml.CSafeLoader)  # a megabyte: seconds without libyaml
    (version,) = (one for one in document["spec"]["versions"] if one["name"] == "v1")
    return _strict(version["schema"]["openAPIV3Schema"])


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    if found.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        found["additionalProperties"] = bool(found.get("x-kubernetes-preserve-unknown-fields"))
    return found


def _against_kubernetes(document: dict[str, Any]) -> None:
    try:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Invalid(_said(document, error)) from None


def _against(schema: dict[str, Any], document: dict[str, Any]) -> None:
    error = jsonschema.exceptions.best_match(jsonschema.Draft7Validator(schema).iter_errors(document))
    if error is not None:
        raise Invalid(_said(document, error))


def _said(document: dict[str, Any], error: jsonschema.ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path) or "the object"
    return f"{document.get('kind')} {document.get('metadata', {}).get('name')}: {where}: {error.message[:500]}"
