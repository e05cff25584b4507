#!/usr/bin/env python3
"""One cache over three nodes (ctest `cluster_net_peers_test`): what one node has, all find, fetch and keep, also when the one that
had it is gone, or another process has its address.

peers_test.py BIN_DIR PROBE_DIR ETCD ETCDCTL [SCENARIO...]
"""
import sys
import time

from cluster_net import LEASE, MUST, WHOLE_BLOCKS, Cluster, check, run


def blocks_travel(programs, folder):
    """What one node has, all find, fetch and keep; a reader that has it needs its source no more."""
    cluster = Cluster(programs, folder)
    try:
        cluster["a"].once("fill", "a", 0, 20)
        took = cluster.expect_found("b", "a", 20)
        cluster["a"].kill()
        kept = cluster["b"].once("check", "a", 0, 20)
        check(kept["hits"] >= WHOLE_BLOCKS * 20 and not kept["errors"], f"b after the death of a: {kept}")
        # The only copies are b's now; the home of some anchors was a.
        cluster.expect_members("bc", MUST)
        cluster.expect_found("c", "a", 20)
        cluster["a"].start()
        cluster.expect_members("abc", MUST)
        cluster["c"].once("fill", "late", 0, 20)
        cluster.expect_found("ab", "late", 20)
        cluster.expect_no_crash()
        return f"found {took:.1f} s after they were stored"
    finally:
        cluster.close()


def another_process_answers(programs, folder):
    """A node with another id, and then the same id anew, at the address of one that died: nobody takes it for that one."""
    cluster = Cluster(programs, folder)
    try:
        c = cluster["c"]
        c.once("fill", "c", 0, 20)
        for name in "ab":
            cluster.start_load(name, "load", 60, sets="c", pause_ms=10)
        time.sleep(1)
        c.kill()
        d = cluster.add("d", c.host)
        d.start()
        check(d.ready["listen"] == c.ready["listen"], "another port")
        d.once("fill", "d", 0, 20)
        time.sleep(LEASE + 1)
        cluster.expect_members("abd", MUST)
        cluster.expect_loads_well("ab", "d in the place of c", hits=False)
        cluster.expect_found("ab", "d", 20)
        d.kill()
        c.start()
        cluster.expect_members("abc", MUST)
        cluster.expect_found("ab", "c", 20)
        cluster.expect_no_crash()
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(run("cluster_net_peers_test", [blocks_travel, another_process_answers]))
