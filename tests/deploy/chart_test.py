"""The Helm chart and the Kubernetes examples (ctest `chart_test`).

Renders the chart with each file of values/ (chart_render does what Helm does), decodes every object as strictly as the
API server, checks what must hold between them (chart_checks.py), and asks kvmilld whether it takes the configuration.
Faults are planted in the objects to see that they would be found.

chart_test.py --render PROGRAM --kvmilld PROGRAM [--openssl PROGRAM] [unittest arguments]
"""
import argparse
import copy
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import chart_checks
import k8s_types
import yaml
from chart_faults import PLANTED, REFUSED, daemon, kind, kvmilld

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
CHART = os.path.join(ROOT, "deploy/helm/kvmill")
EXAMPLES = os.path.join(ROOT, "deploy/kubernetes")
CASES = {os.path.splitext(os.path.basename(path))[0]: path for path in sorted(glob.glob(os.path.join(HERE, "values/*.yaml")))}
OPTIONS = None
NODE = {"KVMILL_NODE_NAME": "node-7.example.com", "KVMILL_ZONE": "eu-1a"}
POD_IP = {"IPv4": "10.1.2.3", "IPv6": "fd00::7"}


def run(command, text=None):
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)


def render(*files, chart=CHART, more=()):
    return run([OPTIONS.render, *more, chart, *files])


def objects_of(case, chart=CHART):
    result = render(CASES[case], chart=chart)
    assert result.returncode == 0, result.stderr
    return k8s_types.load_all(result.stdout)


def told(objects):
    """(configuration file, flags by name, flags as they are) of the daemon, with its variables filled in."""
    config = yaml.safe_load(kind(objects, "ConfigMap")["data"]["kvmill.yaml"])
    values = {**NODE, "KVMILL_POD_IP": POD_IP[kind(objects, "Service")["spec"]["ipFamilies"][0]]}
    flags = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], text) for text in kvmilld(objects)["args"]]
    return config, dict(flag[2:].split("=", 1) for flag in flags), flags


def all_problems(objects):
    found = [problem for value in objects for problem in k8s_types.problems_of(value)]
    if found:
        return found  # What follows looks into objects as they should be.
    config, flags, _ = told(objects)
    return chart_checks.problems_of(objects) + list(chart_checks.check_daemon(objects, config, flags))


class ChartTest(unittest.TestCase):
    def test_every_case_is_what_kubernetes_takes(self):
        self.assertGreaterEqual(len(CASES), 9)
        for case in CASES:
            with self.subTest(case):
                self.assertEqual(all_problems(objects_of(case)), [])
                notes = render(CASES[case], more=["--notes"])
                self.assertEqual(notes.returncode, 0, notes.stderr)
                self.assertNotIn("<no value>", notes.stdout)

    def test_planted_faults_are_found(self):
        whole = objects_of("everything") + objects_of("cluster")
        base = [o for o in objects_of("cluster") if o["kind"] != "ServiceMonitor"]
        monitor = copy.deepcopy(kind(whole, "ServiceMonitor"))
        monitor["metadata"]["labels"] = kind(base, "Service")["metadata"]["labels"]
        monitor["spec"]["selector"] = {"matchLabels": dict(kind(base, "Service")["spec"]["selector"])}
        base.append(monitor)
        rules = kind(base, "NetworkPolicy")["spec"]["ingress"]
        rules.append(kind(objects_of("tls"), "NetworkPolicy")["spec"]["ingress"][2])
        self.assertEqual(all_problems(base), [])
        for name, plant, message in PLANTED:
            with self.subTest(name):
                objects = copy.deepcopy(base)
                plant(objects)
                for value in objects:
                    for volume in value.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", []):
                        for key in [key for key, source in volume.items() if source is None]:
                            del volume[key]
                self.assertIn(message, "\n".join(all_problems(objects)))

    def test_keys_that_are_there_twice_are_found(self):
        with self.assertRaisesRegex(yaml.YAMLError, "again"):
            k8s_types.load_all("a: 1\nb: 2\na: 3\n")

    def test_wrong_values_are_refused_by_name(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "values.yaml")
            for text, message in REFUSED:
                with self.subTest(text):
                    with open(path, "w", encoding="utf-8") as file:
                        file.write(text + "\n")
                    result = render(path)
                    self.assertEqual(result.returncode, 1, result.stdout)
                    self.assertIn(message, result.stderr)
        result = render(more=["--kube-version", "v1.24.9"])
        self.assertIn("kubeVersion", result.stderr)
        self.assertEqual(result.returncode, 1)

    def test_schema_and_values_have_the_same_keys(self):
        with open(os.path.join(CHART, "values.yaml"), encoding="utf-8") as file:
            values = yaml.safe_load(file)
        with open(os.path.join(CHART, "values.schema.json"), encoding="utf-8") as file:
            schema = json.load(file)

        def compare(value, part, path):
            if part.get("additionalProperties") is not False:
                return
            self.assertEqual(set(value), set(part["properties"]) - {"global"}, path)
            for key in value:
                if isinstance(value[key], dict):
                    compare(value[key], part["properties"][key], f"{path}.{key}")

        compare(values, schema, "values")


class RendererTest(unittest.TestCase):
    def test_it_is_formatted(self):
        said = run(["gofmt", "-l", os.path.join(HERE, "render")])
        self.assertEqual((said.returncode, said.stdout), (0, ""))

    def test_it_renders_the_same_every_time(self):
        self.assertEqual(render(CASES["everything"]).stdout, render(CASES["everything"]).stdout)

    def test_values_that_nobody_defines_are_an_error(self):
        with tempfile.TemporaryDirectory() as folder:
            chart = os.path.join(folder, "kvmill")
            shutil.copytree(CHART, chart)
            with open(os.path.join(chart, "templates/zone.yaml"), "w", encoding="utf-8") as file:
                file.write("a: {{ .Values.zone.names }}\n")
            self.assertIn('no entry for key "names"', render(chart=chart).stderr)

    def test_values_of_later_files_win(self):
        objects = k8s_types.load_all(render(CASES["gpu"], CASES["tls"], CASES["small"]).stdout)
        self.assertEqual(daemon(objects)["spec"]["runtimeClassName"], "nvidia")
        self.assertEqual(told(objects)[0]["host_bytes"], "64MiB")
        self.assertIn("tls_cert", told(objects)[0])


class ConfigTest(unittest.TestCase):
    """kvmilld takes what the chart tells it, in every case."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.etc = os.path.join(cls.folder.name, "etc")
        for secret in ("tls", "etcd-tls"):
            os.makedirs(os.path.join(cls.etc, secret))
        made = run([OPTIONS.openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-subj", "/CN=kvmill", "-days", "2", "-keyout", os.path.join(cls.etc, "tls/tls.key"),
                    "-out", os.path.join(cls.etc, "tls/tls.crt")])
        assert made.returncode == 0, made.stderr
        shutil.copy(os.path.join(cls.etc, "tls/tls.crt"), os.path.join(cls.etc, "tls/ca.crt"))
        for name in ("tls.key", "tls.crt", "ca.crt"):
            shutil.copy(os.path.join(cls.etc, "tls", name), os.path.join(cls.etc, "etcd-tls", name))
        os.mkdir(os.path.join(cls.etc, "etcd-password"))
        with open(os.path.join(cls.etc, "etcd-password/password"), "w", encoding="utf-8") as file:
            file.write("secret\n")
        os.mkdir(os.path.join(cls.etc, "disk-keys"))
        with open(os.open(os.path.join(cls.etc, "disk-keys/keys"), os.O_WRONLY | os.O_CREAT, 0o440), "w", encoding="utf-8") as file:
            file.write("".join(f"{(7 * i) % 256:02x}" for i in range(32)) + "\n")
        os.mkdir(os.path.join(cls.etc, "config"))
        cls.options = {name.replace("-", "_") for name in
                       re.findall(r"^ +(?:-\w,)?--([a-z-]+)", run([OPTIONS.kvmilld, "--help"]).stdout, re.MULTILINE)}

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def check_config(self, objects):
        config, _, flags = told(objects)
        # --check-config looks whether the host has the addresses that it would listen on.
        def here(text):
            return text.replace("/etc/kvmill", self.etc).replace(POD_IP["IPv4"], "127.0.0.1").replace(POD_IP["IPv6"], "::1")

        moved = {key: here(str(value)) for key, value in config.items()}
        with open(os.path.join(self.etc, "config/kvmill.yaml"), "w", encoding="utf-8") as file:
            yaml.safe_dump(moved, file)
        with open(os.path.join(self.etc, "config/tenants.yaml"), "w", encoding="utf-8") as file:
            file.write(kind(objects, "ConfigMap")["data"].get("tenants.yaml", "none"))
        flags = [here(flag) for flag in flags]
        return run([OPTIONS.kvmilld, *flags, "--check-config"])

    def test_every_option_is_one_of_the_daemon(self):
        for case in CASES:
            with self.subTest(case):
                config, flags, _ = told(objects_of(case))
                self.assertEqual((set(config) | {name.replace("-", "_") for name in flags}) - self.options, set())

    def test_the_daemon_takes_every_case(self):
        for case in CASES:
            with self.subTest(case):
                result = self.check_config(objects_of(case))
                self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_the_daemon_would_say_so_if_not(self):
        objects = objects_of("insecure")
        data = kind(objects, "ConfigMap")["data"]
        data["kvmill.yaml"] = data["kvmill.yaml"].replace("host_bytes: 8GiB", "host_bytes: 8 GiBs")
        result = self.check_config(objects)
        self.assertEqual(result.returncode, 1)
        self.assertIn("host", result.stderr)

    def test_every_option_that_is_set_arrives(self):
        config, flags, _ = told(objects_of("cluster"))
        self.assertEqual(config["cluster"], "etcd://etcd-0.etcd.infra.svc:2379,etcd-1.etcd.infra.svc:2379,"
                                            "etcd-2.etcd.infra.svc:2380/llm/blue")
        self.assertEqual((config["copies"], config["etcd_user"], config["drain_timeout"]), ("1", "kvmill", "5m"))
        self.assertEqual((flags["zone"], flags["node-id"]), ("eu-1a", "node-7.example.com"))
        self.assertNotIn("insecure", config)
        # Peers are asked by address; the name in their certificate is one for all.
        self.assertEqual(config["tls_server_name"], "kvmill.kvmill.svc")
        self.assertEqual(told(objects_of("tls"))[0]["tls_server_name"], "tiles.example.com")
        # Without a list nodes are known by the names of their own certificate.
        self.assertNotIn("tls_peers", config)
        self.assertEqual(told(objects_of("tls"))[0]["tls_peers"], "tiles.example.com,spiffe://example.com/tiles")
        config, flags, _ = told(objects_of("insecure"))
        self.assertEqual((config["insecure"], config["zone"], config["data_plane_plaintext"]), ("true", "eu-1a", "true"))
        self.assertEqual((flags["ucx"], flags["advertise"]), ("[fd00::7]:7610", "[fd00::7]:7600"))
        config, _, _ = told(objects_of("default"))
        self.assertNotIn("listen", config)
        self.assertNotIn("tenants", config)
        for case, tenant in (("small", "uid-1000"), ("tls", "team-a")):
            self.assertEqual(told(objects_of(case))[0]["tenants"], "/etc/kvmill/config/tenants.yaml")
            tenants = yaml.safe_load(kind(objects_of(case), "ConfigMap")["data"]["tenants.yaml"])["tenants"]
            self.assertEqual(tenants[tenant]["quota"], {"soft": "10GiB", "hard": "20GiB"})
        config, flags, _ = told(objects_of("everything"))
        self.assertEqual((config["encode_threads"], config["eviction_policy"]), ("4", "lru"))
        self.assertEqual(config["disk_key_file"], "/etc/kvmill/disk-keys/keys")
        self.assertNotIn("disk_key_file", told(objects_of("default"))[0])
        self.assertNotIn("ucx", flags)


class ProfileTest(unittest.TestCase):
    def test_gpu_claims_none_and_sees_all(self):
        objects = objects_of("gpu")
        spec = daemon(objects)["spec"]
        variables = {e["name"]: e.get("value") for e in kvmilld(objects)["env"]}
        self.assertEqual((spec["runtimeClassName"], spec["hostIPC"], spec["hostPID"]), ("nvidia", True, True))
        self.assertEqual(variables["NVIDIA_VISIBLE_DEVICES"], "all")
        self.assertEqual(variables["NVIDIA_DRIVER_CAPABILITIES"], "compute,utility")
        config, _, _ = told(objects)
        self.assertEqual((config["gpu_bytes"], config["device"]), ("16GiB", "cuda:0"))
        # 64 GiB, 2 GiB beside them, and a 128th of 16 GiB.
        self.assertEqual(kvmilld(objects)["resources"]["limits"]["memory"], str((64 << 30) + (2 << 30) + (128 << 20)))

    def test_host_has_nothing_of_a_gpu(self):
        text = render(CASES["default"]).stdout
        for word in ("NVIDIA", "runtimeClassName", "hostIPC", "hostPID", "gpu_bytes"):
            self.assertNotIn(word, text)

    def test_mps(self):
        objects = objects_of("gpu_mps")
        variables = {e["name"]: e.get("value") for e in kvmilld(objects)["env"]}
        mounts = {m["name"]: m["mountPath"] for m in kvmilld(objects)["volumeMounts"]}
        self.assertEqual(variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "30")
        self.assertEqual(variables["CUDA_MPS_PIPE_DIRECTORY"], mounts["mps"])
        self.assertTrue(daemon(objects)["spec"]["hostIPC"])
        self.assertEqual(daemon(objects)["spec"]["securityContext"]["runAsUser"], 0)

    def test_rdma_and_huge_pages(self):
        objects = objects_of("rdma")
        resources = kvmilld(objects)["resources"]
        for side in ("requests", "limits"):
            self.assertEqual((resources[side]["rdma/hca"], resources[side]["hugepages-2Mi"]), ("1", "512Mi"))
        self.assertEqual(kvmilld(objects)["securityContext"]["capabilities"], {"drop": ["ALL"], "add": ["IPC_LOCK", "NET_ADMIN"]})
        self.assertEqual(daemon(objects)["spec"]["dnsPolicy"], "ClusterFirstWithHostNet")
        self.assertEqual(told(objects)[0]["huge_pages"], "on")

    def test_secrets_are_nowhere_but_in_the_secret(self):
        objects = objects_of("insecure")
        secret = kind(objects, "Secret")
        self.assertEqual(secret["data"], {"password": "cCB3OiAicXVvdGVkIiAjMQ=="})
        self.assertNotIn("quoted", yaml.safe_dump([o for o in objects if o is not secret]))

    def test_optional_parts_can_be_left_out(self):
        kinds = {o["kind"] for o in objects_of("small")}
        self.assertEqual(kinds, {"ConfigMap", "DaemonSet", "Service"})
        self.assertEqual(daemon(objects_of("small"))["spec"]["serviceAccountName"], "default")
        self.assertTrue(kinds < {o["kind"] for o in objects_of("everything")})

    def test_metrics_have_the_names_that_rules_look_for(self):
        (endpoint,) = kind(objects_of("everything"), "ServiceMonitor")["spec"]["endpoints"]
        labels = {r["targetLabel"]: r.get("replacement", r.get("sourceLabels")) for r in endpoint["relabelings"]}
        self.assertEqual(labels, {"instance": ["__meta_kubernetes_pod_node_name"], "job": "kvmill-tiles", "namespace": ""})

    def test_a_token_is_shown_where_there_is_one(self):
        (endpoint,) = kind(objects_of("tls"), "ServiceMonitor")["spec"]["endpoints"]
        self.assertEqual(endpoint["authorization"], {"type": "Bearer", "credentials": {"name": "kvmill-metrics", "key": "token"}})
        (endpoint,) = kind(objects_of("everything"), "ServiceMonitor")["spec"]["endpoints"]
        self.assertNotIn("authorization", endpoint)

    def test_prometheus_is_told_the_port_of_the_metrics(self):
        with open(os.path.join(ROOT, "docs/operations.md"), encoding="utf-8") as file:
            (targets,) = re.findall(r"static_configs: \[\{targets: \[(.*?)\]", file.read())
        port = told(objects_of("default"))[0]["metrics"].rpartition(":")[2]
        self.assertEqual(set(re.findall(r":(\d+)", targets)), {port})

    def test_another_configuration_is_another_pod(self):
        annotations = [daemon(objects_of(case))["metadata"]["annotations"]["checksum/config"] for case in CASES]
        self.assertEqual(len(set(annotations)), len(CASES))

    def test_what_a_daemon_takes_over_while_it_runs_starts_no_pod_again(self):
        text = open(os.path.join(ROOT, "docs/configuration.md"), encoding="utf-8").read()
        reloadable = set(re.findall(r"^\| `--[a-z-]+` \| `([a-z_]+)` \| .* \| yes \| [^|]*\|$", text, re.MULTILINE))
        template = open(os.path.join(CHART, "templates/_config.tpl"), encoding="utf-8").read()
        (listed,) = re.findall(r"omit \$config (.*?) -}}", template)
        self.assertEqual(set(re.findall(r'"(\w+)"', listed)), reloadable)
        self.assertGreater(len(reloadable), 5)

        def both(values):
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(values)
                file.flush()
                result = render(CASES["default"], file.name)
            self.assertEqual(result.returncode, 0, result.stderr)
            objects = k8s_types.load_all(result.stdout)
            return (daemon(objects)["metadata"]["annotations"]["checksum/config"],
                    kind(objects, "ConfigMap")["data"]["kvmill.yaml"])

        before = both("{}")
        logs = both("logLevel: debug")
        self.assertEqual(logs[0], before[0])
        self.assertNotEqual(logs[1], before[1])
        self.assertNotEqual(both("hostBytes: 9GiB")[0], before[0])
        # Tenants are a file of their own, which it watches, too.
        tenants = "tenants: {uid-1000: {quota: {hard: %sGiB}}}"
        self.assertEqual(both(tenants % 1)[0], both(tenants % 2)[0])
        watch_off = "watchConfig: false\n" + tenants
        self.assertNotEqual(both(watch_off % 1)[0], both(watch_off % 2)[0])
        off, more = both("watchConfig: false"), both("{watchConfig: false, logLevel: debug}")
        self.assertNotIn("watch_config", off[1])
        self.assertNotEqual(more[0], off[0])

    def test_the_grace_period_is_the_sum(self):
        self.assertEqual(daemon(objects_of("cluster"))["spec"]["terminationGracePeriodSeconds"], 300 + 5 + 60)
        self.assertEqual(kvmilld(objects_of("cluster"))["lifecycle"]["preStop"]["exec"]["command"], ["sleep", "5"])
        self.assertEqual(kvmilld(objects_of("everything"))["startupProbe"]["failureThreshold"], 361)  # Of 5 s.

    def test_folders_are_prepared(self):
        """The script of the init container, as it is, on folders as a node and an older pod leave them."""
        (prepare,) = daemon(objects_of("default"))["spec"]["initContainers"]
        command = prepare["command"]
        script = command[:4]
        self.assertEqual(command[4:], ["10001:10001", "00750", "/run/kvmill", "00700", "/var/lib/kvmill"])
        with tempfile.TemporaryDirectory() as folder:
            run_folder, data = os.path.join(folder, "run"), os.path.join(folder, "data of kvmill")
            os.makedirs(os.path.join(data, "below"))
            os.mkdir(run_folder)
            os.chmod(data, 0o2775)
            user, group = (10001, 10001) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
            for _ in range(2):
                result = run([*script, f"{user}:{group}", "00750", run_folder, "00700", data])
                self.assertEqual((result.returncode, result.stderr), (0, ""))
                for path, mode in ((run_folder, 0o750), (data, 0o700)):
                    info = os.stat(path)
                    self.assertEqual((info.st_uid, info.st_gid, info.st_mode & 0o7777), (user, group, mode))
                self.assertEqual(os.stat(os.path.join(data, "below")).st_uid, user)
            self.assertNotEqual(run([*script, f"{user}:{group}", "00750", os.path.join(folder, "none")]).returncode, 0)


class FilesTest(unittest.TestCase):
    """Dashboards and rules go into the chart as they are."""

    def test_links_are_to_what_deploy_has(self):
        for folder, pattern, link_folder in (("grafana", "*.json", "dashboards"), ("prometheus", "*.yml", "rules")):
            for path in glob.glob(os.path.join(ROOT, "deploy", folder, pattern)):
                with open(path, encoding="utf-8") as file:
                    text = file.read()
                if folder == "prometheus" and "groups" not in (yaml.safe_load(text) or {}):
                    continue  # Not a file of rules.
                link = os.path.join(CHART, "files", link_folder, os.path.basename(path))
                want = os.path.relpath(path, os.path.dirname(link))
                self.assertTrue(os.path.islink(link) and os.readlink(link) == want,
                                f"{link} is not there: ln -s {want} {link}")
        for path in glob.glob(os.path.join(CHART, "files/*/*")):
            self.assertTrue(os.path.exists(path), f"{path} leads nowhere")

    def test_what_deploy_has_is_rendered(self):
        objects = objects_of("everything")
        links = glob.glob(os.path.join(CHART, "files/dashboards/*.json"))
        maps = [o for o in chart_checks.of_kind(objects, "ConfigMap") if "grafana_dashboard" in o["metadata"]["labels"]]
        self.assertEqual(len(maps), len(links))
        groups = []
        for path in sorted(glob.glob(os.path.join(CHART, "files/rules/*.yml"))):
            with open(path, encoding="utf-8") as file:
                groups += yaml.safe_load(file)["groups"]
        self.assertEqual(kind(objects, "PrometheusRule")["spec"]["groups"], groups)

    def test_a_dashboard_without_its_rules_is_warned_of(self):
        for rules in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                values = os.path.join(folder, "values.yaml")
                with open(values, "w", encoding="utf-8") as file:
                    yaml.safe_dump({"dashboards": {"enabled": True}, "prometheusRule": {"enabled": rules}}, file)
                notes = render(values, more=["--notes"])
            self.assertEqual(notes.returncode, 0, notes.stderr)
            self.assertEqual("dashboards without prometheusRule" in notes.stdout, not rules, notes.stdout)

    def test_files_are_not_templates(self):
        """Prometheus and Grafana have {{ }} of their own."""
        alert = {"alert": "KvmillDown", "expr": "up == 0", "for": "5m", "labels": {"severity": "page"},
                 "annotations": {"summary": "{{ $labels.instance }} is {{ $value | humanize }}: \"down\""}}
        dashboard = {"title": "kvmill", "legend": "{{tier}}", "text": "a\nb\\n", "panels": [{"expr": "a{b=\"c\"}"}]}
        with tempfile.TemporaryDirectory() as folder:
            chart = os.path.join(folder, "kvmill")
            shutil.copytree(CHART, chart)
            shutil.rmtree(os.path.join(chart, "files"), ignore_errors=True)
            os.makedirs(os.path.join(chart, "files/rules"))
            os.makedirs(os.path.join(chart, "files/dashboards"))
            for name in ("a", "b"):
                with open(os.path.join(chart, f"files/rules/{name}.yml"), "w", encoding="utf-8") as file:
                    yaml.safe_dump({"groups": [{"name": name, "rules": [alert]}]}, file)
            text = json.dumps(dashboard, indent=2) + "\n"
            with open(os.path.join(chart, "files/dashboards/Tiles_by_node.json"), "w", encoding="utf-8") as file:
                file.write(text)
            objects = objects_of("everything", chart)
            self.assertEqual(all_problems(objects), [])
            self.assertEqual(kind(objects, "PrometheusRule")["spec"]["groups"],
                             [{"name": name, "rules": [alert]} for name in ("a", "b")])
            (board,) = [o for o in chart_checks.of_kind(objects, "ConfigMap") if "Tiles_by_node.json" in o["data"]]
            self.assertEqual(board["metadata"]["name"], "tiles-tiles-by-node")
            self.assertEqual(json.loads(board["data"]["Tiles_by_node.json"]), dashboard)
            with open(os.path.join(chart, "files/rules/c.yml"), "w", encoding="utf-8") as file:
                file.write("rule_files: [a.yml]\n")
            self.assertIn("files/rules/c.yml: no groups of rules", render(CASES["everything"], chart=chart).stderr)


class ExamplesTest(unittest.TestCase):
    """deploy/kubernetes: objects, and values for the chart."""

    def test_objects_are_what_kubernetes_takes(self):
        paths = [p for p in glob.glob(os.path.join(EXAMPLES, "*.yaml")) if not os.path.basename(p).startswith("values-")]
        self.assertGreaterEqual(len(paths), 3)
        for path in paths:
            with self.subTest(os.path.basename(path)), open(path, encoding="utf-8") as file:
                objects = k8s_types.load_all(file.read())
                self.assertTrue(objects)
                self.assertEqual([p for o in objects for p in k8s_types.problems_of(o)], [])
                self.assertEqual(chart_checks.problems_of(objects), [])

    def test_values_render(self):
        paths = glob.glob(os.path.join(EXAMPLES, "values-*.yaml"))
        self.assertGreaterEqual(len(paths), 2)
        for path in paths:
            with self.subTest(os.path.basename(path)):
                result = render(path)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(all_problems(k8s_types.load_all(result.stdout)), [])

    def test_the_engine_meets_the_daemon(self):
        with open(os.path.join(EXAMPLES, "engine.yaml"), encoding="utf-8") as file:
            engine = kind(k8s_types.load_all(file.read()), "Deployment")["spec"]["template"]["spec"]
        objects = objects_of("default")
        (volume,) = [v for v in engine["volumes"] if v["name"] == "kvmill"]
        (mount,) = [m for m in engine["containers"][0]["volumeMounts"] if m["name"] == "kvmill"]
        (run_volume,) = [v for v in daemon(objects)["spec"]["volumes"] if v["name"] == "run"]
        self.assertEqual(volume["hostPath"], {"path": run_volume["hostPath"]["path"], "type": "Directory"})
        self.assertEqual(told(objects)[0]["socket"], mount["mountPath"] + "/kvmill.sock")
        self.assertEqual(engine["securityContext"]["supplementalGroups"], [daemon(objects)["spec"]["securityContext"]["runAsGroup"]])


def main():
    global OPTIONS
    parser = argparse.ArgumentParser()
    parser.add_argument("--render", required=True)
    parser.add_argument("--kvmilld", required=True)
    parser.add_argument("--openssl", default="openssl")
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest)


if __name__ == "__main__":
    main()
