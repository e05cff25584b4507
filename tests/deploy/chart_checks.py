"""What must hold between the objects of one release, and what Kubernetes refuses beyond wrong types."""
import re

LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
DNS = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
WORKLOADS = ("DaemonSet", "Deployment", "StatefulSet")
DATA_PORTS = 15  # That follow the one of --ucx: docs/contracts.md.


def of_kind(objects, *kinds):
    return [o for o in objects if o["kind"] in kinds]


def name_of(value):
    return f"{value['kind']} {value['metadata']['name']}"


def twice(names):
    return sorted({name for name in names if names.count(name) > 1})


def selects(selector, labels):
    return all(labels.get(key) == value for key, value in selector.items())


def check_names(value):
    meta = value["metadata"]
    if not DNS.fullmatch(meta["name"]):
        yield f"{name_of(value)}: the name is none"
    for key, label in meta.get("labels", {}).items():
        if not LABEL.fullmatch(label):
            yield f"{name_of(value)}: label {key}: {label!r}"
    if value["kind"] not in ("PriorityClass", "Namespace") and not meta.get("namespace"):
        yield f"{name_of(value)}: no namespace"
    for key in value.get("data", {}):
        if not re.fullmatch(r"[-._a-zA-Z0-9]+", key):
            yield f"{name_of(value)}: key {key!r}"


def check_pod(where, pod, objects, claims=()):
    """A pod or its template, with the volumes that it names; `claims` are those of a StatefulSet."""
    spec, labels = pod["spec"], pod["metadata"].get("labels", {})
    volumes = [v["name"] for v in spec.get("volumes", [])] + list(claims)
    containers = spec.get("initContainers", []) + spec["containers"]
    for name in twice(volumes):
        yield f"{where}: volume {name} again"
    used = set()
    for container in containers:
        here = f"{where}: {container['name']}"
        mounts = container.get("volumeMounts", [])
        used |= {m["name"] for m in mounts}
        for mount in mounts:
            if mount["name"] not in volumes:
                yield f"{here}: mounts {mount['name']}, which is no volume"
        for path in twice([m["mountPath"] for m in mounts]):
            yield f"{here}: two volumes at {path}"
        yield from check_container(here, container)
    for name in set(volumes) - used:
        yield f"{where}: volume {name} is mounted nowhere"
    for volume in spec.get("volumes", []):
        if len(volume) != 2:
            yield f"{where}: volume {volume['name']}: want one source"
        map_name = volume.get("configMap", {}).get("name")
        if map_name and map_name not in [o["metadata"]["name"] for o in of_kind(objects, "ConfigMap")]:
            yield f"{where}: no ConfigMap {map_name}"
    for label in labels.values():
        if not LABEL.fullmatch(label):
            yield f"{where}: label {label!r}"


def check_container(here, container):
    ports = [p["name"] for p in container.get("ports", [])]
    for name in ports:
        if not PORT_NAME.fullmatch(name):
            yield f"{here}: port name {name!r}"
    for name in twice(ports) + twice([p["containerPort"] for p in container.get("ports", [])]):
        yield f"{here}: port {name} again"
    for name in twice([e["name"] for e in container.get("env", [])]):
        yield f"{here}: variable {name} again"
    known = {e["name"] for e in container.get("env", [])}
    for text in container.get("args", []):
        for variable in set(re.findall(r"\$\((\w+)\)", text)) - known:
            yield f"{here}: no variable {variable}"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        port = container.get(probe, {}).get("httpGet", {}).get("port")
        if isinstance(port, str) and port not in ports:
            yield f"{here}: {probe} asks port {port}, which is none"
    requests = container.get("resources", {}).get("requests", {})
    limits = container.get("resources", {}).get("limits", {})
    for resource in set(requests) | set(limits):
        if ("/" in resource or resource.startswith("hugepages-")) and requests.get(resource, limits.get(resource)) != limits.get(resource):
            yield f"{here}: {resource}: request and limit must be the same"


def check_selectors(objects):
    pods = [(o["metadata"].get("namespace"), o["spec"]["template"]) for o in of_kind(objects, *WORKLOADS)]

    def one(namespace, selector):
        return any(n == namespace and selects(selector, t["metadata"]["labels"]) for n, t in pods)

    for value in objects:
        namespace, spec = value["metadata"].get("namespace"), value.get("spec", {})
        if value["kind"] in WORKLOADS and not selects(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"]):
            yield f"{name_of(value)}: does not select its own pods"
        if value["kind"] == "Service" and not one(namespace, spec["selector"]):
            yield f"{name_of(value)}: selects no pod"
        if value["kind"] == "PodDisruptionBudget":
            if not one(namespace, spec["selector"]["matchLabels"]):
                yield f"{name_of(value)}: selects no pod"
            if not isinstance(spec.get("minAvailable"), int):
                yield f"{name_of(value)}: pods of a DaemonSet want minAvailable, a number"
        if value["kind"] == "NetworkPolicy":
            own = [spec["podSelector"]["matchLabels"]]
            own += [peer["podSelector"]["matchLabels"] for rule in spec.get("ingress", []) + spec.get("egress", [])
                    for peer in rule.get("from", []) + rule.get("to", [])
                    if set(peer) == {"podSelector"} and "app.kubernetes.io/instance" in str(peer)]
            if not all(one(namespace, selector) for selector in own):
                yield f"{name_of(value)}: selects no pod"
        if value["kind"] == "ServiceMonitor":
            services = [s for s in of_kind(objects, "Service") if selects(spec["selector"]["matchLabels"], s["metadata"]["labels"])]
            names = [p["name"] for s in services for p in s["spec"]["ports"]]
            if not all(e["port"] in names for e in spec["endpoints"]):
                yield f"{name_of(value)}: selects no port of a service"


def check_service_ports(objects):
    for service in of_kind(objects, "Service"):
        for workload in of_kind(objects, *WORKLOADS):
            template = workload["spec"]["template"]
            if not selects(service["spec"]["selector"], template["metadata"]["labels"]):
                continue
            open_ports = {p["name"]: p["containerPort"] for c in template["spec"]["containers"] for p in c.get("ports", [])}
            for port in service["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                if target not in open_ports and target not in open_ports.values():
                    yield f"{name_of(service)}: port {port['name']} goes to {target}, which no container has"
                elif service["spec"].get("clusterIP") == "None" and open_ports.get(target, target) != port["port"]:
                    yield f"{name_of(service)}: port {port['name']}: a headless service does not translate ports"


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h)", text).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]


def bytes_of(text):
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]+)", text).groups()
    power = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}[unit.rstrip("iB")]
    return int(number) * (1024 if "i" in unit else 1000) ** power


def check_daemon(objects, config, flags):
    """The DaemonSet against what its daemon is told: `config` by the file, `flags` by name."""
    (daemon_set,) = of_kind(objects, "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    mounts = {m["mountPath"]: m for m in container["volumeMounts"]}

    def is_mounted(path):
        return any(path == mount or path.startswith(mount + "/") for mount in mounts)

    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    if spec["terminationGracePeriodSeconds"] < seconds(config["drain_timeout"]) + int(hook[1]) + 10:
        yield "terminationGracePeriodSeconds: too short for preStop and --drain-timeout"
    for option, port in (("metrics", "metrics"), ("listen", "grpc")):
        address = config.get(option)
        if (port in ports) != (address is not None) or (address and int(address.rpartition(":")[2]) != ports[port]):
            yield f"--{option} {address}: the container has {ports}"
    for flag, port in (("advertise", "grpc"), ("ucx", "ucx")):
        if flag in flags and int(flags[flag].rpartition(":")[2]) != ports.get(port):
            yield f"--{flag} {flags[flag]}: the container has {ports}"
    if ("ucx" in flags) != ("ucx" in ports):
        yield f"--ucx: the container has {ports}"
    if "advertise" not in flags and "listen" in config:
        yield "--listen without --advertise: peers cannot reach a wildcard"
    for option, path in {**config, "config": flags["config"]}.items():
        if str(path).startswith("/") and not is_mounted(path):
            yield f"--{option} {path}: no volume is mounted there"
    run = mounts.get("/run/kvmill", {}).get("name")
    if not any(v["name"] == run and "hostPath" in v for v in spec["volumes"]):
        yield "/run/kvmill does not outlive the container"
    memory = int(container["resources"]["limits"]["memory"])
    if memory != int(container["resources"]["requests"]["memory"]):
        yield "memory: request and limit must be the same"
    if memory < bytes_of(config["host_bytes"]) + bytes_of(config.get("gpu_bytes", "0B")) // 128 + (512 << 20):
        yield f"memory: {memory} bytes do not hold --host-bytes {config['host_bytes']}"
    if "nvidia.com/gpu" in str(container["resources"]):
        yield "a GPU is claimed, which engines then do not get"
    security = spec["securityContext"]
    if security["runAsNonRoot"] != (security["runAsUser"] != 0):
        yield "runAsNonRoot and runAsUser differ"
    if container["securityContext"]["capabilities"].get("add") and security["runAsUser"] != 0:
        yield "capabilities are added, and have no effect: not root"
    if spec["automountServiceAccountToken"]:
        yield "a token that nobody needs is mounted"
    for policy in of_kind(objects, "NetworkPolicy"):
        yield from check_policy(policy, ports)


def check_policy(policy, ports):
    for rule in policy["spec"]["ingress"]:
        for port in rule.get("ports", []):
            if isinstance(port["port"], str) and port["port"] not in ports:
                yield f"{name_of(policy)}: no port {port['port']}"
            if "endPort" in port and (port["port"], port["endPort"]) != (ports["ucx"], ports["ucx"] + DATA_PORTS):
                yield f"{name_of(policy)}: ports of UCX are {ports['ucx']} to {ports['ucx'] + DATA_PORTS}"


def problems_of(objects):
    """Of a release or of a file of examples, without what the daemon is told."""
    found = []
    for value in objects:
        found += check_names(value)
        if value["kind"] in WORKLOADS:
            claims = [claim["metadata"]["name"] for claim in value["spec"].get("volumeClaimTemplates", [])]
            found += check_pod(name_of(value), value["spec"]["template"], objects, claims)
        if value["kind"] == "Pod":
            found += check_pod(name_of(value), value, objects)
    found += [f"{name} is there twice" for name in twice([name_of(o) for o in objects])]
    found += check_selectors(objects)
    found += check_service_ports(objects)
    return found
