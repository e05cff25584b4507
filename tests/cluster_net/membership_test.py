#!/usr/bin/env python3
"""Nodes that die, stop, come back, and are cut off (ctest `cluster_net_membership_test`): who is a member, who knows that it may
be wrong, and that each daemon serves its own engine well meanwhile.

membership_test.py BIN_DIR PROBE_DIR ETCD ETCDCTL [SCENARIO...]
"""
import subprocess
import sys
import time

from cluster_net import LEASE, LONG, MUST, Cluster, check, run, until


def members_that_die_and_stop(programs, folder):
    """kill -9, restart on the same folder, SIGSTOP and SIGCONT."""
    cluster = Cluster(programs, folder)
    try:
        cluster.start_loads()
        a, c = cluster["a"], cluster["c"]
        c.once("fill", "kept", 0, 10)
        c.kvmill("flush")

        def dies():
            cluster.forget_loads("ab")
            before = c.ready["boot_id"]
            c.kill()
            gone = cluster.expect_members("ab", MUST)
            cluster.expect_loads_well("ab", "while c was dead")
            c.start()
            check(c.ready["boot_id"] != before, "the restarted daemon has the boot id of the killed one")
            cluster.expect_members("abc", MUST)
            return gone

        for _ in range(3 if LONG else 1):
            # Where the machine stood still before it died less of its lease is left: not every time.
            gone = [dies()]
            while gone[-1] < LEASE / 2 and len(gone) < 3:
                gone.append(dies())
            check(gone[-1] >= LEASE / 2, f"c was forgotten after {gone} s, long before its lease ended")
            kept = c.once("check", "kept", 0, 10)
            check(kept["misses"] == 0, f"after the restart: {kept}")
            c.restart()
            cluster.expect_members("abc", MUST)
            # Its engine had misses each time, and finds the new one by itself.
            report = cluster.loads["c"].report()
            check(report["away"] and not report["errors"], f"the engine of c: {report}")

            def found():
                time.sleep(1)
                report = cluster.loads["c"].report()
                return report["hits"] > 0 and not report["errors"] and not report["away"]
            until(MUST, found, "the engine of c goes on after its restarts")
            time.sleep(1)
            cluster.expect_loads_well("c", "after the restarts of c")

        # Stopped for less than a lease: nothing happens. For longer: gone, and back by itself, the same process.
        def stop_shortly():
            c.stop()
            time.sleep(LEASE / 4)
            c.resume()
            time.sleep(1)
        cluster.expect_unchanged("a short stop", stop_shortly)
        cluster.forget_loads("ab")
        c.stop()
        cluster.expect_members("ab", MUST)
        cluster.expect_loads_well("ab", "while c was stopped")
        c.resume()
        back = cluster.expect_members("abc", MUST)
        kept = c.once("check", "kept", 0, 10)
        check(kept["misses"] == 0 and not kept["errors"], f"after SIGCONT: {kept}")
        cluster.expect_no_crash()
        return f"forgotten after {gone[-1]:.1f} s, back {back:.1f} s after SIGCONT"
    finally:
        cluster.close()


def another_node_at_the_same_address(programs, folder):
    """Host and port of a node that died, taken by a node with another id."""
    cluster = Cluster(programs, folder, "ab")
    try:
        b = cluster["b"]
        address, old = b.ready["listen"], b.ready["boot_id"]
        b.once("fill", "b", 0, 5)
        b.kill()
        d = cluster.add("d", b.host)
        d.start()
        check(d.ready["listen"] == address, f"d listens on {d.ready['listen']}, not on {address}")
        until(MUST, lambda: "d" in cluster["a"].members(), "a sees d")
        cluster.expect_members("ad", MUST)
        check(old not in cluster["a"].members().values(), "the old incarnation is still a member")
        found = d.once("check", "b", 0, 5)
        check(found["hits"] == 0 and not found["errors"], f"d has blocks that only b had: {found}")
        cluster.expect_no_crash()
    finally:
        cluster.close()


def cut_links(programs, folder):
    """Of one node to etcd, in one direction only, between nodes, of everybody to etcd; then all of them heal."""
    cluster = Cluster(programs, folder)
    net = cluster.net
    try:
        cluster.start_loads()
        etcd, b, c = cluster.etcd.host, cluster["b"].host, cluster["c"].host
        for _ in range(3 if LONG else 1):
            # c cannot hear etcd: it is forgotten, keeps its view, says that it may be wrong, and serves.
            cluster.forget_loads("abc")
            net.link(c, etcd, up=False)
            cluster.expect_members("ab", MUST)
            cluster.expect_members("abc", MUST, at="c", stale=True)
            cluster.expect_loads_well("abc", "while c was cut off from etcd")
            net.link(c, etcd)
            healed = cluster.expect_members("abc", MUST)
            # What etcd says does not arrive, what c says does.
            net.one_way(etcd, c, up=False)
            until(MUST, lambda: cluster["c"].status()["stale"], "c knows that it hears nothing")
            net.one_way(etcd, c)
            cluster.expect_members("abc", MUST)
            # Two nodes that cannot reach each other and both reach etcd.
            def cut():
                net.link(b, c, up=False)
                time.sleep(LEASE + 1)
            cluster.expect_unchanged("a cut between two nodes", cut)
            net.link(b, c)
            if LONG:
                # A device that is down is no silence: whoever sends gets an error.
                for state in ("down", "up"):
                    subprocess.run(net.command(c, "ip", "link", "set", "eth0", state), check=True)
                    if state == "down":
                        cluster.expect_members("ab", MUST)
                        cluster.expect_loads_well("abc", "while c had no network")
                cluster.expect_members("abc", MUST)
            # Everybody: nobody is forgotten, all say so.
            net.links_of(etcd, up=False)
            cluster.expect_members("abc", MUST, stale=True)
            time.sleep(LEASE)
            cluster.expect_members("abc", 1, stale=True)
            cluster.expect_loads_well("abc", "while etcd was cut off")
            net.links_of(etcd)
            cluster.expect_members("abc", MUST)
        cluster.expect_no_crash()
        return f"one that was cut off was back after {healed:.1f} s"
    finally:
        cluster.close()


def slow_and_lossy_links(programs, folder):
    """A network that is slow and loses packets changes nothing; one that is terrible breaks nothing."""
    cluster = Cluster(programs, folder)
    try:
        cluster.start_loads()
        cluster.net.all_links(delay_ms=20, loss=0.02)
        cluster.forget_loads("abc")
        cluster.expect_unchanged("a slow network", lambda: time.sleep(20 if LONG else 2 * LEASE))
        cluster.expect_loads_well("abc", "over a slow network")
        cluster.net.all_links(delay_ms=150, loss=0.3)
        time.sleep(30 if LONG else LEASE + 2)
        cluster.expect_loads_well("abc", "over a terrible network")
        cluster.net.all_links()
        healed = cluster.expect_members("abc", MUST)
        cluster.expect_no_crash()
        return f"agreed {healed:.1f} s after the end of 30 % loss"
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(run("cluster_net_membership_test", [members_that_die_and_stop, another_node_at_the_same_address, cut_links,
                                                 slow_and_lossy_links]))
