"""Tables of chart_test.py: values that the chart refuses, and faults of objects that the checks must find."""
import chart_checks


# Parts of a release.
def kind(objects, name):
    return chart_checks.of_kind(objects, name)[0]


def daemon(objects):
    return kind(objects, "DaemonSet")["spec"]["template"]


def kvmilld(objects):
    return daemon(objects)["spec"]["containers"][0]


# Values that are refused, and what the message must have: the value's name first of all.
REFUSED = [
    ("hostbytes: 8GiB", "hostbytes"),
    ("hostBytes: 8 gigs", "hostBytes: Does not match pattern"),
    ("hostBytes: 8", "hostBytes: Invalid type. Expected: string"),
    ("hostBytes: 63MiB", "hostBytes 63MiB: want at least 64MiB"),
    ("memoryOverhead: 100MiB", "memoryOverhead 100MiB: want at least 512MiB"),
    ("profile: cpu", "profile must be one of"),
    ("profile: gpu\ngpu: {bytes: 1MiB}", "gpu.bytes 1MiB: want at least 64MiB"),
    ("gpu: {device: auto}", "gpu.device: Does not match pattern"),
    ("resources: {limits: {memory: 8Gi}}", "resources.limits.memory"),
    ("hugePages: {mode: always}", "hugePages.mode must be one of"),
    ("user: {gid: 0}", "user.gid: Must be greater than or equal to 1"),
    ("socket: {hostPath: run/kvmill}", "socket.hostPath: Does not match pattern"),
    ("etcd: {endpoints: ['http://etcd:2379']}", "etcd.endpoints.0: Does not match pattern"),
    ("etcd: {endpoints: [etcd]}", "etcd.endpoints.0: Does not match pattern"),
    ("etcd: {endpoints: ['etcd:2379']}", "want TLS: set tls.existingSecret, or tls.insecure=true"),
    ("remote: {enabled: true}", "want TLS: set tls.existingSecret, or tls.insecure=true"),
    ("remote: {enabled: true}\ntls: {existingSecret: a, insecure: true}", "tls.existingSecret a: tls.insecure is true as well"),
    ("tls: {peers: [a.example]}", "tls.peers a.example: needs tls.existingSecret"),
    ("remote: {enabled: true}\ntls: {existingSecret: s, peers: ['a,b']}", "tls.peers.0: Does not match pattern"),
    ("remote: {enabled: true}\ntls: {existingSecret: s, peers: [a]}\nconfig: {tls_peers: b}",
     "config.tls_peers: the chart sets this option from another value"),
    ("etcd: {user: kvmill}", "etcd.user kvmill: needs etcd.existingSecret or etcd.password"),
    ("etcd: {password: x}", "need etcd.user"),
    ("etcd: {user: u, password: x, existingSecret: s}", "etcd.existingSecret s: etcd.password is set as well"),
    ("etcd: {tls: {clientCertificate: true}}", "etcd.tls.clientCertificate: needs etcd.tls.existingSecret"),
    ("disk: {enabled: false, encryption: {existingSecret: s}}", "disk.encryption.existingSecret s: needs disk.enabled"),
    ("disk: {encryption: {key: s}}", "key"),
    ("serviceMonitor: {authorization: {existingSecret: s}}", "serviceMonitor.authorization.existingSecret s: needs tenants"),
    ("serviceMonitor: {authorization: {existingSecret: s}}\ntenants: {a: {certificates: [x], metrics: true}}", "needs tenants"),
    ("serviceMonitor: {authorization: {existingSecret: s, key: ''}}", "serviceMonitor.authorization.key"),
    ("copies: 1", "copies 1: needs etcd.endpoints"),
    ("copies: 5", "copies: Must be less than or equal to 4"),
    ("replicationRate: 1KiB", "replicationRate 1KiB: want at least 64KiB"),
    ("zone: {name: a, fromPodLabel: b}", "zone.name a: zone.fromPodLabel is set as well"),
    ("zone: {name: 'eu 1'}", "zone.name: Does not match pattern"),
    ("drain: {timeout: 61m}", "drain.timeout 61m: want at most 1h"),
    ("drain: {timeout: '30'}", "drain.timeout: Does not match pattern"),
    ("drain: {extraSeconds: 0}", "drain.extraSeconds: Must be greater than or equal to 10"),
    ("podDisruptionBudget: {minAvailable: 50%}", "podDisruptionBudget.minAvailable: Invalid type. Expected: integer"),
    ("podDisruptionBudget: {maxUnavailable: 1}", "maxUnavailable is not allowed"),
    ("hostNetwork: true", "hostNetwork: network policies do not apply"),
    ("priorityClass: {create: true}", "priorityClass.create: needs priorityClass.name"),
    ("ports: {grpc: 7640}", "ports.metrics 7640: is ports.grpc as well"),
    ("ports: {metrics: 7625}", "ports.metrics 7625: ports.ucx 7610 and the 15 that follow"),
    ("ports: {ucx: 65521}", "ports.ucx: Must be less than or equal to 65520"),
    ("podLabels: {app.kubernetes.io/name: x}", "podLabels.app.kubernetes.io/name: selectors need this label"),
    ("config: {host_bytes: 1GiB}", "config.host_bytes: the chart sets this option from another value"),
    ("config: {eviction-policy: lru}", "eviction-policy"),
    ("logLevel: loud", "logLevel must be one of"),
]

# Faults in the objects of the case `cluster` with a monitor and clients, and what must be said.
PLANTED = [
    ("unknown field", lambda o: kvmilld(o).update(livenesProbe={}), "no field 'livenesProbe'"),
    ("wrong type", lambda o: kvmilld(o)["ports"][0].update(containerPort="7640"), "want int"),
    ("missing field", lambda o: kvmilld(o).pop("name"), "must not be `None`"),
    ("field of another kind", lambda o: kind(o, "Service")["spec"].update(replicas=1), "no field 'replicas'"),
    ("number for a text", lambda o: kvmilld(o)["resources"]["limits"].update(cpu=2), "want str"),
    ("field of a monitor", lambda o: kind(o, "ServiceMonitor")["spec"]["endpoints"][0].update(targetport=1), "no field 'targetport'"),
    ("old kind", lambda o: kind(o, "PodDisruptionBudget").update(apiVersion="policy/v1beta1"), "no such kind"),
    ("selector", lambda o: daemon(o)["metadata"]["labels"].update({"app.kubernetes.io/name": "x"}), "does not select its own pods"),
    ("service", lambda o: kind(o, "Service")["spec"]["selector"].update(x="y"), "selects no pod"),
    ("budget", lambda o: kind(o, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].update(x="y"), "selects no pod"),
    ("percentage", lambda o: kind(o, "PodDisruptionBudget")["spec"].update(minAvailable="50%"), "want minAvailable, a number"),
    ("policy", lambda o: kind(o, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].update(x="y"), "selects no pod"),
    ("policy's port", lambda o: kind(o, "NetworkPolicy")["spec"]["ingress"][0]["ports"][0].update(port="metric"), "no port metric"),
    ("policy's range", lambda o: kind(o, "NetworkPolicy")["spec"]["ingress"][2]["ports"][1].update(endPort=7624), "ports of UCX"),
    ("monitor", lambda o: kind(o, "ServiceMonitor")["spec"]["endpoints"][0].update(port="http"), "selects no port"),
    ("target", lambda o: kind(o, "Service")["spec"]["ports"][0].update(targetPort="http"), "which no container has"),
    ("translated port", lambda o: kind(o, "Service")["spec"]["ports"][0].update(port=80), "does not translate ports"),
    ("probe", lambda o: kvmilld(o)["readinessProbe"]["httpGet"].update(port="http"), "asks port http"),
    ("mount without volume", lambda o: kvmilld(o)["volumeMounts"][0].update(name="x"), "which is no volume"),
    ("volume without mount", lambda o: daemon(o)["spec"]["volumes"].append({"name": "x", "emptyDir": {}}), "mounted nowhere"),
    ("no map", lambda o: daemon(o)["spec"]["volumes"][0]["configMap"].update(name="x"), "no ConfigMap x"),
    ("two volumes in a place", lambda o: kvmilld(o)["volumeMounts"][1].update(mountPath="/tmp"), "two volumes at /tmp"),
    ("variable", lambda o: kvmilld(o)["env"].pop(0), "no variable KVMILL_NODE_NAME"),
    ("grace", lambda o: daemon(o)["spec"].update(terminationGracePeriodSeconds=300), "too short"),
    ("memory", lambda o: kvmilld(o)["resources"]["limits"].update(memory="8589934592"), "request and limit must be the same"),
    ("little memory", lambda o: [kvmilld(o)["resources"][k].update(memory="8589934592") for k in ("limits", "requests")],
     "do not hold --host-bytes"),
    ("port of the daemon", lambda o: kvmilld(o)["ports"][0].update(containerPort=7641), "--metrics"),
    ("claimed GPU", lambda o: kvmilld(o)["resources"]["limits"].update({"nvidia.com/gpu": "1"}), "a GPU is claimed"),
    ("capability", lambda o: kvmilld(o)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]), "have no effect"),
    ("socket's folder", lambda o: next(v for v in daemon(o)["spec"]["volumes"] if v["name"] == "run").update(
        hostPath=None, emptyDir={}), "does not outlive the container"),
    ("secret that is not mounted", lambda o: kvmilld(o)["volumeMounts"].remove(
        {"name": "tls", "mountPath": "/etc/kvmill/tls", "readOnly": True}), "no volume is mounted there"),
    ("name", lambda o: kind(o, "Service")["metadata"].update(name="Kvmill"), "the name is none"),
    ("twice", lambda o: o.append(kind(o, "Service")), "is there twice"),
]
