#!/usr/bin/env python3
"""Every node is restarted, one after the other, under load (ctest `cluster_net_rolling_test`): by SIGTERM, as a new version is rolled
out, and by kill -9.

rolling_test.py BIN_DIR PROBE_DIR ETCD ETCDCTL [SCENARIO...]
"""
import sys
import time

from cluster_net import LEASE, LONG, WHOLE_BLOCKS, Cluster, check, run

SETS = "a,b,c"
BACK = LEASE + 8
ROUNDS = 5 if LONG else 1


def roll(programs, folder, stop):
    cluster = Cluster(programs, folder)
    loaded = total = 0
    try:
        for seed, name in enumerate(cluster.nodes, 1):
            cluster.start_load(name, "load", 40, sets=SETS, pause_ms=30, seed=seed)
        time.sleep(1)
        for _ in range(ROUNDS):
            for name in cluster.nodes:
                others = [n for n in cluster.nodes if n != name]
                cluster.forget_loads(others)
                # Its own engine goes elsewhere, as a router sends it.
                cluster.loads[name].kill()
                stop(cluster[name])
                cluster[name].start()
                cluster.expect_members("abc", BACK)
                for other in others:
                    report = cluster.loads[other].expect_well(f"while {name} was restarted")
                    loaded += report["hits"]
                    total += report["hits"] + report["misses"]
                cluster.start_load(name, "load", 40, sets=SETS, pause_ms=30, seed=ord(name))
        time.sleep(1)
        # What the engines stored is somewhere: a drain makes it durable, and of a crash the others have copies of what they read.
        for name in cluster.nodes:
            report = cluster[name].once("check", name, 0, 40)
            check(not report["errors"], f"{name}: {report}")
            check(report["hits"] > 0.5 * WHOLE_BLOCKS * 40, f"{name} found {report}")
        cluster.expect_no_crash()
        return f"hit rate {loaded / total:.2f} meanwhile"
    finally:
        cluster.close()


def rolling_restart(programs, folder):
    return roll(programs, folder, lambda node: node.terminate())


def rolling_crash(programs, folder):
    return roll(programs, folder, lambda node: node.kill())


if __name__ == "__main__":
    sys.exit(run("cluster_net_rolling_test", [rolling_restart, rolling_crash]))
