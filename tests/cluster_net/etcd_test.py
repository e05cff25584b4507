#!/usr/bin/env python3
"""What becomes of a cluster when its etcd is killed, stopped, emptied, restored or compacted, forgets everybody, or is three
servers (ctest `cluster_net_etcd_test`).

etcd_test.py BIN_DIR PROBE_DIR ETCD ETCDCTL [SCENARIO...]
"""
import concurrent.futures
import os
import shutil
import sys
import time

from cluster_net import GRACE, LEASE, LONG, MUST, Cluster, Etcd, Net, Node, check, run, until


def etcd_dies_and_stops(programs, folder):
    """kill -9 and restart on its data; SIGSTOP, for less and for more than a lease."""
    cluster = Cluster(programs, folder)
    etcd = cluster.etcd
    try:
        cluster.start_loads()
        for _ in range(3 if LONG else 1):
            etcd.kill()
            cluster.expect_members("abc", MUST, stale=True)
            cluster.expect_loads_well("abc", "while etcd was dead")
            etcd.start()
            restarted = cluster.expect_members("abc", MUST)

            # A blink: nobody was to say anything about it.
            def blink():
                etcd.stop()
                time.sleep(LEASE / 4)
                etcd.resume()
            cluster.expect_unchanged("a short stop of etcd", blink)
            etcd.stop()
            cluster.expect_members("abc", MUST, stale=True)
            time.sleep(LEASE)
            cluster.expect_members("abc", 1, stale=True)
            cluster.expect_loads_well("abc", "while etcd was stopped")
            # One that starts now serves its engine at once, and joins when etcd answers.
            c = cluster["c"]
            cluster.loads["c"].kill()
            c.restart()
            check(c.status()["registration"] == "joining", f"without etcd: {c.status()}")
            check(c.once("fill", "alone", 0, 3)["stored"] > 0, "nothing was stored")
            etcd.resume()
            resumed = cluster.expect_members("abc", MUST)
            cluster.loads.pop("c")
            cluster.start_load("c")
        cluster.expect_no_crash()
        return f"agreed {restarted:.1f} s after its restart, {resumed:.1f} s after SIGCONT"
    finally:
        cluster.close()


def etcd_with_another_history(programs, folder):
    """Empty under another cluster id and under the same, and from a backup."""
    cluster = Cluster(programs, folder)
    etcd = cluster.etcd
    try:
        cluster.start_loads()
        etcd.start_empty()
        emptied = cluster.expect_members("abc", MUST)
        etcd.start_empty(same_id=True)
        cluster.expect_members("abc", MUST)
        # Its backup knows an incarnation of b that is no more.
        etcd.kill()
        shutil.copytree(etcd.data(), etcd.data() + "-backup")
        etcd.start()
        cluster.loads["b"].kill()
        cluster["b"].restart()
        cluster.expect_members("abc", MUST)
        for n in range(50):
            etcd.control("put", f"/other/{n}", "x")
        later = etcd.revision()
        etcd.kill()
        shutil.rmtree(etcd.data())
        os.rename(etcd.data() + "-backup", etcd.data())
        etcd.start()
        check(etcd.revision() < later, "the backup is not older")
        restored = cluster.expect_members("abc", MUST)
        cluster.expect_loads_well("ac", "while etcd changed its history")
        cluster.expect_no_crash()
        return f"agreed {emptied:.1f} s after etcd was empty, {restored:.1f} s after a backup"
    finally:
        cluster.close()


def compacted_while_away(programs, folder):
    """A watch cannot go on where it ended: what changed meanwhile is compacted."""
    cluster = Cluster(programs, folder)
    etcd, net, c = cluster.etcd, cluster.net, cluster["c"]
    try:
        net.link(etcd.host, c.host, up=False)
        before = cluster["b"].ready["boot_id"]
        cluster.expect_members("ab", MUST)
        cluster["b"].restart()
        cluster.expect_members("ab", MUST)
        until(MUST, lambda: c.status()["stale"], "c knows that it hears nothing")
        check(c.members()["b"] == before, "c has heard of the restart")
        for n in range(20):
            etcd.control("put", f"/kvmill/other/{n}", "x")
        etcd.control("compact", str(etcd.revision()))
        net.link(etcd.host, c.host)
        healed = cluster.expect_members("abc", MUST)
        cluster.expect_no_crash()
        return f"agreed after {healed:.1f} s"
    finally:
        cluster.close()


def everybody_at_once(programs, folder):
    """Leases that end together: revoked, of processes that all stopped, of most of them."""
    cluster = Cluster(programs, folder)
    etcd, a = cluster.etcd, cluster["a"]
    try:
        cluster.start_loads()
        # Nobody died. Who asks meanwhile still sees everybody, unless one was back before the next one went: not every time.
        missed = []
        for _ in range(3):
            leases = [line for line in etcd.control("lease", "list").splitlines() if line and not line.startswith("found")]
            check(len(leases) == 3, f"leases: {leases}")
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda lease: etcd.control("lease", "revoke", lease), leases))
            end, missed = time.monotonic() + LEASE + 1, []
            while time.monotonic() < end:
                seen = a.members()
                if set(seen) != set("abc"):
                    missed.append(seen)
                time.sleep(0.1)
            cluster.expect_members("abc", MUST)
            cluster.expect_loads_well("abc", "while all leases were revoked")
            if not missed:
                break
        check(not missed, f"a knew {missed}")

        # All stop, etcd forgets all, all go on.
        for node in cluster.nodes.values():
            node.stop()
        until(MUST, lambda: "members/" not in etcd.control("get", "--prefix", "--keys-only", "/kvmill/"), "etcd forgot all")
        for node in cluster.nodes.values():
            node.resume()
        together = cluster.expect_members("abc", MUST)

        # Two of three stop: more than a third. They are believed in for the grace, then not.
        cluster.forget_loads("a")
        for name in "bc":
            cluster[name].stop()

        def keeps_all():
            status = a.status()
            return status["keeping"] and {member["id"] for member in status["members"]} == set("abc")
        until(MUST, keeps_all, lambda: f"a keeps those that vanished together: {a.status()}")
        kept = cluster.expect_members("a", GRACE + MUST)
        cluster.expect_loads_well("a", "alone")
        for name in "bc":
            cluster[name].resume()
        cluster.expect_members("abc", MUST)
        cluster.expect_no_crash()
        return f"all agreed {together:.1f} s after all had stopped; two of three were kept {kept:.1f} s"
    finally:
        cluster.close()


def three_servers(programs, folder):
    """One of three dies or is cut off: nobody notices. Two: everybody says so, and it heals."""
    cluster = Cluster(programs, folder, etcds=3)
    try:
        cluster.start_loads()
        net = cluster.net

        def between_servers(etcd, **what):
            for other in cluster.etcds:
                if other is not etcd:
                    net.link(etcd.host, other.host, **what)
        faults = [(Etcd.kill, Etcd.start), (Etcd.stop, Etcd.resume),
                  # It answers, and has nothing to say: the others have another leader.
                  (lambda etcd: between_servers(etcd, up=False), between_servers)]
        if LONG:
            faults.append((lambda etcd: net.links_of(etcd.host, up=False), lambda etcd: net.links_of(etcd.host)))
        for fault, heal in faults:
            leading = []
            until(MUST, lambda: leading.extend(etcd for etcd in cluster.etcds if etcd.leads()) or leading, "a leader of etcd")
            leader = leading[0]
            fault(leader)
            end = time.monotonic() + LEASE + 1
            while time.monotonic() < end:
                check(set(cluster["a"].members()) == set("abc"), f"a knows {cluster['a'].status()}")
                time.sleep(0.1)
            cluster.expect_members("abc", MUST)
            heal(leader)
            leader.wait()
        others = [etcd for etcd in cluster.etcds if etcd is not leader]
        # No majority.
        for etcd in others:
            etcd.kill()
        cluster.expect_members("abc", MUST, stale=True)
        cluster.expect_loads_well("abc", "without a majority of etcd")
        for etcd in others:
            etcd.start(wait=False)
        healed = cluster.expect_members("abc", MUST)
        cluster.expect_no_crash()
        return f"agreed {healed:.1f} s after there was a majority again"
    finally:
        cluster.close()


def ipv6_only(programs, folder):
    """Between hosts, and all on the loopback of one."""
    cluster = Cluster(programs, folder, "ab", ipv6=True)
    try:
        check(all("[" in node.ready["listen"] for node in cluster.nodes.values()), "they listen on IPv6")
        cluster["b"].once("fill", "v6", 0, 3, server=cluster["a"].ready["listen"])
        found = cluster["b"].once("check", "v6", 0, 3, server=cluster["a"].ready["listen"])
        check(found["misses"] == 0, f"over IPv6: {found}")
    finally:
        cluster.close()
    net = Net(programs, 1)
    etcd = Etcd(programs, net, 1, folder, address="::1")
    nodes = [Node(programs, net, 1, folder, f"l{n}", f"etcd://{etcd.client}", address="::1", port=7600 + n) for n in (1, 2)]
    try:
        etcd.start()
        for node in nodes:
            node.start()
        want = {node.name: node.ready["boot_id"] for node in nodes}
        until(MUST, lambda: all(node.members() == want for node in nodes), "both know each other over ::1")
        nodes[0].once("fill", "v6", 0, 3, server=nodes[1].ready["listen"])
        found = nodes[0].once("check", "v6", 0, 3, server=nodes[1].ready["listen"])
        check(found["misses"] == 0, f"over ::1: {found}")
    finally:
        for process in [*nodes, etcd]:
            process.kill()
        net.close()


if __name__ == "__main__":
    sys.exit(run("cluster_net_etcd_test", [etcd_dies_and_stops, three_servers, everybody_at_once, etcd_with_another_history,
                                           compacted_while_away, ipv6_only], at_once=3))
