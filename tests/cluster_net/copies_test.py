#!/usr/bin/env python3
"""A cluster that keeps a second copy of every block loses a node under load, and then another one (ctest `cluster_net_copies_test`).

copies_test.py BIN_DIR PROBE_DIR ETCD ETCDCTL [SCENARIO...]
"""
import sys
import time

from cluster_net import LEASE, LONG, STAND_STILL, WHOLE_BLOCKS, Cluster, check, run, until

SETS = "a,b,c"
SEQUENCES = 200 if LONG else 60  # Of each set.
GROUPS = 2                       # Layer groups: `kvmill stat` counts (block, group) pairs.
PAIRS = 3 * SEQUENCES * WHOLE_BLOCKS * GROUPS
RATE = 8 << 20
# A process that started less than a minute ago copies at a sixteenth of the rate and more.
RATE_AT_THE_START = RATE / 16
SLACK = 40
ETCD_STEP = 0.5  # etcd looks so often which leases have ended.


def pairs_on(cluster, names):
    return {name: cluster[name].kvmill("stat")["blocks"] for name in names}


def host_bytes_of(cluster, name):
    return cluster[name].kvmill("stat")["tiers"]["host"]["used_bytes"]


def loss_of_one_of_three(programs, folder):
    cluster = Cluster(programs, folder, flags=("--copies", "1", "--replication-rate", str(RATE)))
    try:
        begin = time.monotonic()
        for name in cluster.nodes:
            cluster[name].once("fill", name, 0, SEQUENCES)
        total = sum(host_bytes_of(cluster, name) for name in cluster.nodes)
        until(total / 3 / RATE_AT_THE_START + SLACK, lambda: sum(pairs_on(cluster, "abc").values()) >= 2 * PAIRS,
              lambda: f"second copies of {PAIRS}: {pairs_on(cluster, 'abc')}", every=0.5)
        copied = time.monotonic() - begin
        for seed, name in enumerate("ac", 1):
            cluster.start_load(name, "read", SEQUENCES, sets=SETS, pause_ms=20, seed=seed)
        time.sleep(1)
        looked = cluster.expect_found("c", "b", SEQUENCES)
        cluster.forget_loads("ac")
        lost_bytes = host_bytes_of(cluster, "b")
        cluster["b"].kill()
        killed = time.monotonic()
        # Each block has another copy: within one lease time all of it is there. It is asked for all the time, each time as long
        # as it took before; the last but one may have been a little too early.
        cluster.expect_found("c", "b", SEQUENCES)
        available = time.monotonic() - killed
        limit = LEASE + ETCD_STEP + 2 * looked + STAND_STILL.since(killed)
        check(available <= limit, f"all found {available:.1f} s after the loss, want at most {limit:.1f}")
        cluster.expect_loads_well("ac", "after the loss of b")
        # The two that are left copy what they lack, not faster than they may, and not much slower.
        predicted = LEASE + lost_bytes / RATE_AT_THE_START
        until(predicted + SLACK, lambda: min(pairs_on(cluster, "ac").values()) >= PAIRS,
              lambda: f"all of {PAIRS} on both: {pairs_on(cluster, 'ac')}", every=0.5)
        repaired = time.monotonic() - killed
        cluster.expect_loads_well("ac", "while copies were made again")
        # So another one may go.
        cluster.loads["c"].kill()
        cluster["c"].kill()
        left = cluster["a"].once("check", SETS, 0, SEQUENCES)
        check(left["hits"] >= 3 * SEQUENCES * WHOLE_BLOCKS and not left["errors"], f"alone a has {left}")
        cluster.expect_loads_well("a", "alone")
        cluster.expect_no_crash()
        return (f"copied after {copied:.1f} s, all found {available:.1f} s after the loss (at most {limit:.1f}; to ask took {looked:.1f} s), "
                f"second copies again {repaired:.1f} s after it (predicted at most {predicted:.1f})")
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(run("cluster_net_copies_test", [loss_of_one_of_three]))
