"""Decodes Kubernetes objects as strictly as the API server does with `--validate=strict`.

The types are those of Debian's python3-kubernetes, which are generated from the API's own description: every field has
its name, its type and whether it must be there. Kinds of the Prometheus operator and of cert-manager are described below.
"""
import re

import kubernetes.client as api
import yaml

# Of CustomResourceDefinitions we use few fields: name -> type, as the models have it; * takes any name.
CUSTOM = {
    "ServiceMonitor": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "ServiceMonitorSpec"},
    "ServiceMonitorSpec": {"selector": "V1LabelSelector", "namespaceSelector": "NamespaceSelector",
                           "endpoints": "list[Endpoint]"},
    "Certificate": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "CertificateSpec"},
    "CertificateSpec": {"secretName": "str", "dnsNames": "list[str]", "usages": "list[str]", "issuerRef": "dict(str, str)",
                        "privateKey": "dict(str, str)"},
    "NamespaceSelector": {"any": "bool", "matchNames": "list[str]"},
    "Endpoint": {"port": "str", "path": "str", "interval": "str", "scheme": "str", "authorization": "Authorization",
                 "relabelings": "list[Relabeling]"},
    "Authorization": {"type": "str", "credentials": "V1SecretKeySelector"},
    "Relabeling": {"sourceLabels": "list[str]", "targetLabel": "str", "replacement": "str", "action": "str", "regex": "str"},
    "PrometheusRule": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "PrometheusRuleSpec"},
    "PrometheusRuleSpec": {"groups": "list[RuleGroup]"},
    "RuleGroup": {"name": "str", "interval": "str", "rules": "list[Rule]"},
    "Rule": {"record": "str", "alert": "str", "expr": "object", "for": "str", "labels": "dict(str, str)",
             "annotations": "dict(str, str)"},
}
KINDS = {  # (apiVersion, kind) -> type
    ("v1", "ConfigMap"): "V1ConfigMap", ("v1", "Namespace"): "V1Namespace", ("v1", "Secret"): "V1Secret",
    ("v1", "Service"): "V1Service", ("v1", "ServiceAccount"): "V1ServiceAccount", ("v1", "Pod"): "V1Pod",
    ("apps/v1", "DaemonSet"): "V1DaemonSet", ("apps/v1", "Deployment"): "V1Deployment",
    ("apps/v1", "StatefulSet"): "V1StatefulSet",
    ("policy/v1", "PodDisruptionBudget"): "V1PodDisruptionBudget",
    ("networking.k8s.io/v1", "NetworkPolicy"): "V1NetworkPolicy",
    ("scheduling.k8s.io/v1", "PriorityClass"): "V1PriorityClass",
    ("cert-manager.io/v1", "Certificate"): "Certificate",
    ("monitoring.coreos.com/v1", "ServiceMonitor"): "ServiceMonitor",
    ("monitoring.coreos.com/v1", "PrometheusRule"): "PrometheusRule",
}
SCALARS = {"str": str, "int": int, "bool": bool, "float": (int, float)}


class _StrictLoader(yaml.SafeLoader):
    """A key that is there twice is an error, as it is for the API server."""


def _mapping(loader, node, deep=False):
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    again = [key for i, key in enumerate(keys) if key in keys[:i]]
    if again:
        raise yaml.constructor.ConstructorError(None, None, f"key {again[0]!r} again", node.start_mark)
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_all(text):
    """The objects of a stream of YAML documents."""
    return [document for document in yaml.load_all(text, Loader=_StrictLoader) if document is not None]


def problems_of(value):
    """Sentences about fields that the API does not have, of the wrong type, or missing."""
    kind = KINDS.get((value.get("apiVersion"), value.get("kind")))
    if kind is None:
        return [f"no such kind: {value.get('apiVersion')} {value.get('kind')}"]
    return list(_check(value, kind, value["kind"]))


def _check(value, kind, path):
    many = re.fullmatch(r"list\[(.+)\]", kind)
    named = re.fullmatch(r"dict\(str, (.+)\)", kind)
    if kind == "object":
        return
    if kind in SCALARS:
        if not isinstance(value, SCALARS[kind]) or (kind != "bool" and isinstance(value, bool)):
            yield f"{path}: want {kind}, not {value!r}"
    elif many:
        if not isinstance(value, list):
            yield f"{path}: want a list, not {value!r}"
            return
        for i, item in enumerate(value):
            yield from _check(item, many[1], f"{path}[{i}]")
    elif not isinstance(value, dict):
        yield f"{path}: want a map, not {value!r}"
    elif named:
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{path}: key {key!r} is no text"
            yield from _check(item, named[1], f"{path}.{key}")
    elif kind in CUSTOM:
        yield from _check_fields(value, CUSTOM[kind], path)
    else:
        model = getattr(api, kind)
        names = model.attribute_map
        yield from _check_fields(value, {names[name]: model.openapi_types[name] for name in names}, path)
        yield from _check_required(value, model, path)


def _check_fields(value, fields, path):
    for name, item in value.items():
        if name not in fields:
            yield f"{path}: no field {name!r}"
        elif item is None:
            yield f"{path}.{name}: null"
        else:
            yield from _check(item, fields[name], f"{path}.{name}")


def _check_required(value, model, path):
    """The models refuse to be made without what must be there, one field at a time."""
    given = {name: value[field] for name, field in model.attribute_map.items() if field in value}
    try:
        model(**given)
    except ValueError as error:
        yield f"{path}: {error}"
