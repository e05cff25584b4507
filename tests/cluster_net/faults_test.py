#!/usr/bin/env python3
"""Nodes and links that fail while engines on all nodes read what the others have (ctest `cluster_net_faults_test`): no engine gets an
error or a wrong byte because of another node, and none waits for long; what cannot be had is a miss.

faults_test.py BIN_DIR PROBE_DIR ETCD ETCDCTL [SCENARIO...]
"""
import sys
import time

from cluster_net import LEASE, LONG, MUST, Cluster, check, run

LOOKUP_MS = 1500  # Over a peer that says nothing: its hedge and what a busy machine adds,
FETCH_MS = 3500   #   and a pull from it that is given up after 2 s and tried elsewhere.
SETS = "a,b,c"


def expect_served(cluster, names, what):
    """The engines of these: no errors, no waiting."""
    worst = {}
    for name in names:
        report = cluster.loads[name].expect_well(what, sequences=30)
        # The worst of a hundred is bounded by expect_well: the machine may stand still during it.
        for call, limit in (("lookup_ms", LOOKUP_MS), ("fetch_ms", FETCH_MS)):
            check(report[call]["p99"] <= limit + report["stood_still_ms"], what, f"{call} on {name}: {report[call]}",
                  cluster[name].tail())
            worst[call] = max(worst.get(call, 0), report[call]["max"])
    return f"{what}: lookup {worst['lookup_ms']:.0f} ms, fetch {worst['fetch_ms']:.0f} ms at most"


def start_shared_loads(cluster, count=80):
    for seed, name in enumerate(cluster.nodes, 1):
        cluster.start_load(name, "load", count, sets=SETS, pause_ms=20, seed=seed)


def nodes_fail_under_load(programs, folder):
    """kill -9 and restart, SIGSTOP and SIGCONT, of each in turn, while engines on the others read what it has."""
    cluster = Cluster(programs, folder)
    said = []
    try:
        start_shared_loads(cluster)
        time.sleep(2)
        for name in "abc" if LONG else "b":
            others = [n for n in cluster.nodes if n != name]
            cluster[name].once("fill", "only-" + name, 0, 20)
            for other in others:
                cluster.loads[other].kill()
                cluster.start_load(other, "load", 60, sets=f"{SETS},only-{name}", pause_ms=20, seed=ord(name))
            cluster.forget_loads(others)
            cluster[name].stop()
            time.sleep(LEASE + 2)
            said.append(expect_served(cluster, others, f"{name} stopped"))
            cluster[name].resume()
            cluster.expect_members("abc", MUST)
            cluster.forget_loads(others)
            cluster.loads[name].kill()
            cluster[name].kill()
            time.sleep(1)
            said.append(expect_served(cluster, others, f"{name} killed"))
            cluster.expect_members(others, MUST)
            cluster[name].start()
            cluster.expect_members("abc", MUST)
            time.sleep(1)
            said.append(expect_served(cluster, others, f"{name} back"))
            cluster.start_load(name, "load", 80, sets=SETS, pause_ms=20, seed=9)
        cluster.expect_no_crash()
        return "; ".join(said)
    finally:
        cluster.close()


def links_fail_under_load(programs, folder):
    """Between two nodes: cut, cut in one direction, slow and lossy; then what one has is found again by the other."""
    cluster = Cluster(programs, folder)
    net, said = cluster.net, []
    try:
        start_shared_loads(cluster)
        a, b = cluster["a"].host, cluster["b"].host
        for what, fault in (("cut", lambda: net.link(a, b, up=False)), ("cut one way", lambda: net.one_way(b, a, up=False)),
                            ("slow and lossy", lambda: net.link(a, b, delay_ms=30, loss=0.1))):
            cluster["b"].once("fill", "b-" + what[:5].strip(), 0, 10)
            cluster.forget_loads("abc")
            fault()
            time.sleep(8 if LONG else 3)
            said.append(expect_served(cluster, "abc", what))
            net.link(a, b)
        cluster.expect_members("abc", MUST)
        for load in cluster.loads.values():
            load.kill()
        cluster["b"].once("fill", "healed", 0, 20)
        # A peer that failed is left alone for a while, and not for ever.
        cluster.expect_found("ac", "healed", 20)
        cluster.expect_no_crash()
        return "; ".join(said)
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(run("cluster_net_faults_test", [nodes_fail_under_load, links_fail_under_load]))
