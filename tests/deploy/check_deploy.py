#!/usr/bin/env python3
"""Checks that what operators get fits the daemon (ctest `deploy_files`): docs/metrics.md, the rules of deploy/prometheus,
the dashboard of deploy/grafana.

Fails on: a docs/metrics.md that is not what `kvmilld --print-metrics` says; an expression that promtool cannot parse, or
that asks for a metric, a label or a recording rule that is not there; an alert without severity, summary, a `runbook`
heading in docs/operations.md, a place in its table of symptoms, a test that it fires and one that it is silent; a heading
of that chapter without alert;
rules or tests that promtool finds wrong; a dashboard with panels that share an id or a place, or that Grafana would ask
questions about; a panel of rates whose unit does not say that they are a second's. `--self-test` plants such faults and
checks that they are found.

check_deploy.py --kvmilld PROGRAM --promtool PROGRAM [ROOT]
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

import yaml

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import check_docs  # noqa: E402  # pylint: disable=wrong-import-position

REFERENCE, RUNBOOK, DASHBOARD = "docs/metrics.md", "docs/operations.md", "deploy/grafana/kvmill.json"
RULES = ("deploy/prometheus/kvmill-recording.yml", "deploy/prometheus/kvmill-alerts.yml")
RULE_TESTS = "tests/deploy/alerts_test.yml"

# Labels that Prometheus adds, and the one of histograms.
LABELS_OF_ALL = {"job", "instance", "le"}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}
KEYWORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "offset", "bool", "inf",
            "nan", "atan2"}
# Of a scrape, not of kvmill.
FOREIGN = {"up": {"job", "instance"}}
# A sum of rates, which no other divides, and units of Grafana for it.
RATE = r"sum( by \([^)]*\) )?\(rate\([^()]*\)\)"
UNITS_OF_RATES = {"Bps", "reqps"}
# Faults of the self-test that nothing else finds: the tests of the rules take their time.
NEED_RULE_TESTS = {"nothing", "threshold", "arithmetic"}


class Families:
    """What /metrics has: name -> (type, labels)."""

    def __init__(self, reference):
        self.types, self.labels = {}, dict(FOREIGN)
        for cells in check_docs.table_rows(reference):
            name, kind = cells[0].strip("`"), cells[1]
            self.types[name] = kind
            for suffix in SUFFIXES.get(kind, ("",)):
                self.labels[name + suffix] = set(check_docs.names_in(cells[3])) | LABELS_OF_ALL


def metrics_of(expression):
    """(metric, labels of its matchers) of a PromQL expression that promtool could parse."""
    text = re.sub(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", '""', expression)
    text = re.sub(r"#.*", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    for match in re.finditer(r"(?<![\w:.])([A-Za-z_:][\w:]*)\s*(\(|\{[^}]*\})?", text):
        name, behind = match.group(1), match.group(2) or ""
        if behind != "(" and name.lower() not in KEYWORDS:
            yield name, set(re.findall(r"(\w+)\s*(?:=|!)", behind))


def check_expression(where, expression, families, recorded):
    for name, labels in metrics_of(expression):
        if ":" in name:
            if name not in recorded:
                yield f"{where}: nobody records {name}"
            continue
        known = families.labels.get(name)
        if known is None:
            yield f"{where}: there is no metric {name}"
            continue
        for label in sorted(labels - known):
            yield f"{where}: {name} has no label {label}"


def check_alert(rule, anchors, tests):
    where = f"alert {rule['alert']}"
    if rule.get("labels", {}).get("severity") not in ("critical", "warning"):
        yield f"{where}: its severity is neither critical nor warning"
    annotations = rule.get("annotations", {})
    if not annotations.get("summary"):
        yield f"{where}: it has no summary"
    file, _, anchor = annotations.get("runbook", "").partition("#")
    if file != RUNBOOK or anchor not in anchors:
        yield f"{where}: runbook {annotations.get('runbook')} is no heading of {RUNBOOK}"
    fires = [bool(test["exp_alerts"]) for test in tests if test["alertname"] == rule["alert"]]
    if True not in fires or False not in fires:
        yield f"{where}: {RULE_TESTS} lacks a test that it fires, or one that it does not"


def check_rules(root, promtool, families, runs_tests):
    """Problems, and the names that are recorded."""
    problems, rules = [], []
    for path in RULES:
        for group in yaml.safe_load(check_docs.read(root, path))["groups"]:
            rules += group["rules"]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        name = rule.get("record") or rule["alert"]
        problems += check_expression(name, rule["expr"], families, recorded)
    runbook = check_docs.read(root, RUNBOOK)
    chapter = re.search(r"^## Alerts\n(.*?)(?=^## |\Z)", runbook, re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^### (.*)$", chapter.group(1) if chapter else "", re.MULTILINE)
    tests = [test for case in yaml.safe_load(check_docs.read(root, RULE_TESTS))["tests"]
             for test in case.get("alert_rule_test", [])]
    alerts = [rule for rule in rules if "alert" in rule]
    for rule in alerts:
        problems += check_alert(rule, set(map(check_docs.anchor_of, headings)), tests)
    where = re.search(r"^## Where to look\n(.*?)(?=^## |\Z)", runbook, re.MULTILINE | re.DOTALL)
    for rule in alerts:
        if f"(#{check_docs.anchor_of(rule['alert'])})" not in (where.group(1) if where else ""):
            problems.append(f"{RUNBOOK}: the table of symptoms does not lead to {rule['alert']}")
    for heading in sorted(set(headings) - {rule["alert"] for rule in alerts}):
        problems.append(f"{RUNBOOK}: there is no alert {heading}")
    problems += run(promtool, ["check", "rules", *RULES], root)
    if runs_tests:
        problems += run(promtool, ["test", "rules", RULE_TESTS], root)
    return problems, recorded


def run(promtool, arguments, folder):
    result = subprocess.run([promtool, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return [f"promtool {' '.join(arguments)}:\n{result.stdout}{result.stderr}"] if result.returncode else []


def overlap(a, b):
    return (a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"] and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"])


def check_dashboard(root, promtool, families, recorded):
    board = json.loads(check_docs.read(root, DASHBOARD))
    if not board.get("uid") or board.get("id") is not None or "__inputs" in board:
        yield f"{DASHBOARD}: to be provisioned it has a uid, and neither an id nor inputs"
    variables = {variable["name"] for variable in board["templating"]["list"]}
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    if not panels:
        yield f"{DASHBOARD}: no panels"
    ids = [panel["id"] for panel in board["panels"]]
    for panel_id in sorted({i for i in ids if ids.count(i) > 1}):
        yield f"{DASHBOARD}: two panels with id {panel_id}"
    for i, panel in enumerate(board["panels"]):
        for other in board["panels"][:i]:
            if overlap(panel["gridPos"], other["gridPos"]):
                yield f"{DASHBOARD}: {panel['title']} lies on {other['title']}"
    wrapped = []
    for panel in panels:
        where = f"panel {panel['title']}"
        if not panel.get("description") or not panel.get("targets") or not panel["fieldConfig"]["defaults"].get("unit"):
            yield f"{where}: it lacks a description, targets or a unit"
        unit = panel["fieldConfig"]["defaults"].get("unit", "")
        for target in panel.get("targets", []):
            expression = target["expr"]
            if re.fullmatch(RATE, expression) and not (unit.endswith("/s") or unit in UNITS_OF_RATES):
                yield f"{where}: its unit is {unit}, and it shows what happens in a second"
            for name in set(re.findall(r"\$(\w+)", expression)) - variables - {"__rate_interval"}:
                yield f"{where}: there is no variable {name}"
            expression = re.sub(r"\$\w+", "5m", expression)
            yield from check_expression(where, expression, families, recorded)
            wrapped.append({"record": f"panel:{len(wrapped)}", "expr": expression})
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            for name in re.findall(r"kvmill_\w+", variable["query"]["query"]):
                if name not in families.labels:
                    yield f"{DASHBOARD}: variable {variable['name']}: there is no metric {name}"
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "panels.yml"), "w", encoding="utf-8") as file:
            yaml.safe_dump({"groups": [{"name": "panels", "rules": wrapped}]}, file)
        yield from run(promtool, ["check", "rules", "panels.yml"], folder)


def check_tree(root, reference, promtool, runs_tests=True):
    problems = []
    families = Families(reference)
    if not families.types:
        problems.append("kvmilld --print-metrics has no table of metrics")
    if check_docs.read(root, REFERENCE) != reference:
        problems.append(f"{REFERENCE} is not what the code says: kvmilld --print-metrics > {REFERENCE}")
    found, recorded = check_rules(root, promtool, families, runs_tests)
    problems += found
    problems += check_dashboard(root, promtool, families, recorded)
    return problems


def self_test(root, reference, promtool):
    """Each fault, planted alone into a copy of the real files, is found."""
    files = [REFERENCE, RUNBOOK, DASHBOARD, RULE_TESTS, *RULES]
    alerts, recording = RULES[1], RULES[0]
    planted = {
        "nothing": (alerts, "", ""),
        "old reference": (REFERENCE, "| counter |", "| gauge |"),
        "metric of an alert": (alerts, "kvmill_membership_stale ==", "kvmill_membership_old =="),
        "metric of a recording rule": (recording, "rate(kvmill_hit_blocks_total[5m])", "rate(kvmill_hits_total[5m])"),
        "histogram without suffix": (recording, "kvmill_quantization_error_ratio_sum[1h]", "kvmill_quantization_error_ratio[1h]"),
        "label of a matcher": (alerts, 'tickets_ended_total{end="deadline"}', 'tickets_ended_total{reason="deadline"}'),
        "recording rule": (alerts, "instance:kvmill_leased:ratio >", "instance:kvmill_leases:ratio >"),
        "syntax": (alerts, "kvmill_draining == 1", "kvmill_draining =="),
        "severity": (alerts, "severity: critical", "severity: bad"),
        "summary": (alerts, "summary:", "description:"),
        "runbook": (RUNBOOK, "### KvmillDown\n", "### KvmillGone\n"),
        "heading of no alert": (RUNBOOK, "### KvmillDown\n", "### KvmillDown\n\n### KvmillUp\n"),
        "alert of no symptom": (RUNBOOK, "[KvmillDown](#kvmilldown), ", ""),
        "untested alert": (RULE_TESTS, "alertname: KvmillStagingFull", "alertname: KvmillStaging"),
        "threshold": (alerts, "job_peer:kvmill_peer_failures:ratio_rate5m > 0.1", "job_peer:kvmill_peer_failures:ratio_rate5m > 0.9"),
        "arithmetic": (recording, "kvmill_tier_used_bytes / kvmill_tier_capacity_bytes", "kvmill_tier_used_bytes * kvmill_tier_capacity_bytes"),
        "metric of a panel": (DASHBOARD, "kvmill_evicted_blocks_total", "kvmill_dropped_blocks_total"),
        "variable of a panel": (DASHBOARD, "$instance", "$node"),
        "panel id": (DASHBOARD, '"id": 3,', '"id": 4,'),
        "panel place": (DASHBOARD, '"x": 12,', '"x": 5,'),
        "unit of rates": (DASHBOARD, '"unit": "suffix: blocks/s"', '"unit": "none"'),
        "not provisioned": (DASHBOARD, '"uid": "kvmill"', '"uid": ""'),
    }
    wrong = 0
    for name, (path, before, after) in planted.items():
        with tempfile.TemporaryDirectory() as copy:
            for file in files:
                text = check_docs.read(root, file)
                if file == path:
                    assert before in text, f"{name}: {before} is not in {file}"
                    text = text.replace(before, after)
                os.makedirs(os.path.dirname(os.path.join(copy, file)), exist_ok=True)
                with open(os.path.join(copy, file), "w", encoding="utf-8") as out:
                    out.write(text)
            problems = check_tree(copy, reference, promtool, name in NEED_RULE_TESTS)
        if bool(problems) != (name != "nothing"):
            wrong += 1
            print(f"planted {name}: {problems or 'not found'}")
    print(f"deploy self-test: {len(planted) - 1} planted faults, {wrong} wrong")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kvmilld", required=True)
    parser.add_argument("--promtool", required=True)
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("root", nargs="?", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    arguments = parser.parse_args()
    reference = subprocess.run([arguments.kvmilld, "--print-metrics"], capture_output=True, text=True, check=True).stdout
    if arguments.self_test:
        return self_test(arguments.root, reference, arguments.promtool)
    problems = check_tree(arguments.root, reference, arguments.promtool)
    for problem in problems:
        print(problem)
    print(f"deploy: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
