"""Strict schemas of the custom resources in `deploy/k8s/components`: the fields used there and no others.

Written from their documentation: PodMonitor v1, ScaledObject v1alpha1 (KEDA 2.17 and later), InferencePool v1,
HTTPRoute v1. They find misspelt and misplaced fields, as the servers' own schemas would.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def _map(required: str = "", **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Schema, least: int = 1, most: int = 16) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _one_of(*words: str) -> Schema:
    return {"enum": list(words)}


def _resource(api_version: str, kind: str, spec: Schema) -> Schema:
    texts = {"type": "object", "additionalProperties": TEXT}
    metadata = _map("name namespace", name=TEXT, namespace=TEXT, labels=texts, annotations=texts)
    return _map(
        "apiVersion kind metadata spec",
        apiVersion=_one_of(api_version),
        kind=_one_of(kind),
        metadata=metadata,
        spec=spec,
    )


LABELS: Schema = {"type": "object", "additionalProperties": TEXT, "minProperties": 1}
EXPRESSION = _map("key operator", key=TEXT, operator=_one_of("In", "NotIn", "Exists"), values=_list(TEXT))
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}

POD_MONITOR = _resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    _map(
        "selector podMetricsEndpoints",
        selector=_map(matchLabels=LABELS, matchExpressions=_list(EXPRESSION)),
        podTargetLabels=_list(TEXT),
        podMetricsEndpoints=_list(_map("port", port=TEXT, path=TEXT, interval=DURATION, scrapeTimeout=DURATION)),
    ),
)

_SCALING = _map(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy=_one_of("Max", "Min", "Disabled"),
    policies=_list(_map("type value periodSeconds", type=_one_of("Pods", "Percent"), value=COUNT, periodSeconds=COUNT)),
)
_TRIGGER = _map(
    "type metadata",
    type=_one_of("prometheus"),
    name=TEXT,
    metricType=_one_of("AverageValue", "Value"),
    # KEDA takes text alone here.
    metadata=_map(
        "serverAddress query threshold",
        serverAddress=TEXT,
        query=TEXT,
        threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
        activationThreshold=TEXT,
        ignoreNullValues=_one_of("true", "false"),
    ),
)
SCALED_OBJECT = _resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    _map(
        "scaleTargetRef triggers minReplicaCount maxReplicaCount",
        scaleTargetRef=_map("name", name=TEXT, kind=TEXT, apiVersion=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        cooldownPeriod=COUNT,
        fallback=_map(
            "failureThreshold replicas",
            failureThreshold=COUNT,
            replicas=COUNT,
            behavior=_one_of("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
        ),
        advanced=_map(horizontalPodAutoscalerConfig=_map(behavior=_map(scaleUp=_SCALING, scaleDown=_SCALING))),
        triggers=_list(_TRIGGER),
    ),
)

INFERENCE_POOL = _resource(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    _map(
        "selector targetPorts endpointPickerRef",
        selector=_map("matchLabels", matchLabels=LABELS),
        targetPorts=_list(_map("number", number=PORT), most=8),
        appProtocol=_one_of("http", "kubernetes.io/h2c"),
        endpointPickerRef=_map(
            "name",
            group=TEXT,
            kind=TEXT,
            name=TEXT,
            port=_map("number", number=PORT),
            failureMode=_one_of("FailOpen", "FailClose"),
        ),
    ),
)

_PATH = _map("type value", type=_one_of("Exact", "PathPrefix"), value={"type": "string", "pattern": "^/"})
HTTP_ROUTE = _resource(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    _map(
        "parentRefs rules",
        parentRefs=_list(_map("name", name=TEXT, namespace=TEXT, sectionName=TEXT)),
        hostnames=_list(TEXT),
        rules=_list(
            _map(
                "backendRefs",
                matches=_list(_map(path=_PATH)),
                timeouts=_map(request=DURATION, backendRequest=DURATION),
                backendRefs=_list(_map("name", group=TEXT, kind=TEXT, name=TEXT, port=PORT, weight=COUNT)),
            )
        ),
    ),
)

SCHEMAS = {
    "PodMonitor": POD_MONITOR,
    "ScaledObject": SCALED_OBJECT,
    "InferencePool": INFERENCE_POOL,
    "HTTPRoute": HTTP_ROUTE,
}
