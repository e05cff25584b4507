#!/usr/bin/env python3
"""Every node is restarted, one after the other, under load (ctest `cluster_net_rolling_test`): by SIGTERM, as a new version is rolled
out, also with TLS and a new certificate each time, and by kill -9. No engine sees an error, also not the one on the node that is
restarted, which has misses while its daemon is away and hits afterwards.

rolling_test.py BIN_DIR PROBE_DIR ETCD ETCDCTL [SCENARIO...]
"""
import os
import sys
import time

from cluster_net import LONG, MUST, Cluster, check, run

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from certificates import Authority  # noqa: E402  # pylint: disable=wrong-import-position

SETS = "a,b,c"  # Which are there before; the engines store those of another one.
SEQUENCES = 40  # Of each set.
ROUNDS = 5 if LONG else 1


def roll(programs, folder, stop, drains, authority=None):
    cluster = Cluster(programs, folder, authority=authority)
    loaded = total = away = 0
    try:
        for name in cluster.nodes:
            cluster[name].once("fill", name, 0, SEQUENCES)
            if not drains:
                cluster[name].kvmill("flush")
        for seed, name in enumerate(cluster.nodes, 1):
            cluster.start_load(name, "load", SEQUENCES, sets=SETS + ",new", pause_ms=30, seed=seed)
        time.sleep(1)
        for _ in range(ROUNDS):
            for name in cluster.nodes:
                others = [n for n in cluster.nodes if n != name]
                own = cluster.loads[name]
                cluster.forget_loads(cluster.nodes)
                stop(cluster[name])
                own.expect_well(f"until {name} had ended", hits=False, sequences=0, away=True)
                # It goes on, with misses only, and what it computes is stored nowhere.
                report = own.expect_well(f"while {name} was away", hits=False, away=True)
                check(report["away"] > 0 and report["dropped"] > 0, f"the engine on {name} did not notice: {report}")
                away += report["away"]
                if authority is not None:
                    cluster[name].renew()
                cluster[name].start()
                # Registered again, and blocks come again.
                own.expect_well(f"when {name} was back", away=True)
                own.expect_well(f"after {name} was back")
                cluster.expect_members("abc", MUST)
                for other in others:
                    report = cluster.loads[other].expect_well(f"while {name} was restarted")
                    loaded += report["hits"]
                    total += report["hits"] + report["misses"]
        # What was stored at first is there, and all find it: a drain makes it durable, as a flush does before a crash.
        cluster.expect_found("abc", SETS, SEQUENCES)
        cluster.expect_no_crash()
        return f"hit rate {loaded / total:.2f} meanwhile, {away} calls without a daemon"
    finally:
        cluster.close()


def rolling_restart(programs, folder):
    return roll(programs, folder, lambda node: node.terminate(), drains=True)


def rolling_restart_with_tls(programs, folder):
    return roll(programs, folder, lambda node: node.terminate(), drains=True, authority=Authority(folder))


def rolling_crash(programs, folder):
    return roll(programs, folder, lambda node: node.kill(), drains=False)


if __name__ == "__main__":
    sys.exit(run("cluster_net_rolling_test", [rolling_restart, rolling_restart_with_tls, rolling_crash]))
