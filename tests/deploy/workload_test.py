#!/usr/bin/env python3
"""Every counter of /metrics, after each step of a scripted workload against a real daemon, is what a model of its own says
(ctest `metrics_workload_test`), before and after the daemon is started again with damaged blocks on its disk.

A family or a series without expectation fails the test, and so does an expectation without series. The model counts what
the script does; sizes come from docs/formats.md, not from the daemon's answers.

workload_test.py --bin-dir DIR --source-dir DIR --promtool PROGRAM, with PYTHONPATH=BUILD/python.
"""
import argparse
import os
import sys
import time
import unittest

import numpy as np

import kvmill

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(HERE, "..", "client", "cli"), os.path.join(HERE, "..")]
import check_docs  # noqa: E402  # pylint: disable=wrong-import-position
import cli_support  # noqa: E402  # pylint: disable=wrong-import-position
import exposition  # noqa: E402  # pylint: disable=wrong-import-position

PROMTOOL = ""
LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 2, 64, 64
FORMAT = "k4v2_g64"
RECORD_BYTES = 3840
RAW_BYTES = 2 * LAYERS * HEADS * TOKENS * HEAD_DIM * 2  # K and V in 16 bits.
DISK_BYTES, HOST_BYTES = 64 << 20, 64 << 20
PAGE_TOKENS, ENGINE_PAGES = 16, 4
WAIT_SECONDS = 60
BIG = 1e15


def page_bytes(*heads):
    """Of a page with heads of so many bytes (docs/formats.md)."""
    def align(n):
        return (n + 63) // 64 * 64
    return align(128 + 24 * len(heads)) + sum(map(align, heads))


TILE_PAGE = page_bytes(*[RECORD_BYTES] * HEADS)
TILE_BLOCK = LAYERS * TILE_PAGE


def raw_head(tokens):
    return 2 * tokens * HEAD_DIM * 2


def values(seed, tokens=TOKENS):
    random = np.random.default_rng(seed)
    return [tuple(random.standard_normal((tokens, HEADS, HEAD_DIM)).astype(np.float16) for _ in "kv") for _ in range(LAYERS)]


def keys(name, count, first=0):
    return [f"{name} {i:08}".encode() for i in range(first, first + count)]


def blocks(name, count, seed=0, first=0):
    all_keys = keys(name, first + count)
    return [kvmill.Block(all_keys[i], values(seed + i), parent=all_keys[i - 1] if i else b"", block_index=i)
            for i in range(first, first + count)]


def small_namespace(name):
    return kvmill.NamespaceSpec(groups=[kvmill.LayerGroup(range(LAYERS), HEADS, HEAD_DIM)], model=name, block_tokens=TOKENS)


def families_of_kvmilld():
    return exposition.families_of(os.path.join(cli_support.BIN_DIR, "kvmilld"), check_docs.table_rows, check_docs.names_in)


def geometry(region):
    """Of pages of PAGE_TOKENS tokens in shared memory, for one block."""
    page = 2 * PAGE_TOKENS * HEADS * HEAD_DIM
    places = [kvmill.EnginePlace(0, i * ENGINE_PAGES * page) for i in range(2 * LAYERS)]
    return kvmill.EngineGeometry([region], [kvmill.EngineLayers(
        keys=places[::2], values=places[1::2], page_count=ENGINE_PAGES, page_bytes=page, page_stride_bytes=page,
        token_stride_bytes=2 * HEADS * HEAD_DIM, head_stride_bytes=2 * HEAD_DIM, block_tokens=TOKENS,
        page_tokens=PAGE_TOKENS, head_dim=HEAD_DIM, head_count=HEADS)])


class Daemon(cli_support.Daemon):
    def __init__(self, *flags):
        super().__init__("--metrics", "127.0.0.1:0", "--host-bytes", str(HOST_BYTES), "--disk-bytes", str(DISK_BYTES), *flags)


class Case(unittest.TestCase):
    """A daemon, a client, and the model of a daemon that has just been started."""

    flags = ()
    has_namespace = False

    def setUp(self):
        self.daemon = Daemon(*self.flags)
        self.addCleanup(self.daemon.remove)
        self.addCleanup(self.daemon.stop)
        self.families = families_of_kvmilld()
        self.connect()

    def connect(self):
        self.client = kvmill.Client(self.daemon.server, timeout=60)
        self.addCleanup(self.client.close)
        self.model = self.fresh_model()

    def command(self, *arguments):
        return cli_support.Case.kvmill(self, *arguments, "--json", server=self.daemon.server).json()

    def scrape(self):
        return exposition.Scrape(exposition.get(self.daemon.ready), self.families)

    def wait(self, what, is_so):
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_so(self.scrape().values):
            self.assertLess(time.monotonic(), deadline, f"{what} did not come to be")
            time.sleep(0.005)

    def compare(self, step):
        """The whole scrape with the whole model, once what runs in the background has come to rest."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            self.account_of_tenants()
            different = list(self.model.differences(self.scrape()))
            if not different:
                return
            if time.monotonic() > deadline:
                self.fail(f"after {step}:\n  " + "\n  ".join(different))
            time.sleep(0.02)

    def account_of_tenants(self):
        """What `ls` has, of the one tenant; once it has a namespace."""
        if not self.has_namespace:
            return
        listed = self.command("ls")
        used = sum(entry["bytes"] for entry in listed)
        host = sum(entry["bytes"] for entry in listed if entry["tier"] == "host")
        self.model.set("quota_used_bytes", used, tenant="default")
        self.model.set("quota_charged_bytes", (used, BIG), tenant="default")
        self.model.set("quota_tier_bytes", host, tenant="default", tier="host")
        self.model.set("quota_tier_bytes", (used - host, used), tenant="default", tier="disk")
        self.model.set("quota_rejections_total", 0, tenant="default")

    def fresh_model(self):
        m = exposition.Model(self.families)
        ready = self.daemon.ready
        m.set("build_info", 1, version=ready["version"], device="host", boot_id=ready["boot_id"])
        m.set("start_time_seconds", (time.time() - 3600, time.time() + 60))
        m.set("config_loaded_time_seconds", (time.time() - 3600, time.time() + 60))
        for result in ("applied", "refused"):
            m.set("config_reloads_total", 0, result=result)
        for name in ("config_refused", "config_pending_options", "log_messages_suppressed_total", "draining", "lookup_blocks_total", "lookup_tokens_total", "skipped_promotions_total", "unpromoted_blocks",
                     "data_connections", "data_hosts", "data_calls", "staging_bytes", "sessions", "leases", "leased_bytes",
                     "registrations", "lease_expirations_total", "referenced_blocks", "unwritten_blocks", "disk_write_failures_total", "assembling_blocks",
                     "membership_stale", "replication_bytes_total", "replication_queue_runs",
                     "handing_over_blocks", "pointer_differences_total", "tickets_created_total",
                     "events_dropped_total", "event_readers", "event_blocks", "event_walks_total"):
            m.set(name, 0)
        m.set("metadata_bytes", (1, BIG))
        m.set("host_huge_page_bytes", (0, HOST_BYTES))
        zeros = [("lookup_requests_total", "result", ("hit", "partial", "miss")),
                 ("hit_blocks_total", "tier", ("host", "disk")), ("hit_tokens_total", "tier", ("host", "disk")),
                 ("stored_blocks_total", "result", ("stored", "existing", "rejected", "raw")),
                 ("tier_used_bytes", "tier", ("host", "disk")), ("tier_blocks", "tier", ("host", "disk")),
                 ("eviction_age_seconds", "tier", ("host", "disk")), ("checksum_failures_total", "tier", ("host", "disk")),
                 ("events_total", "event", ("stored", "moved", "removed", "cleared")),
                 ("members", "state", ("serving", "draining")), ("pulled_blocks_total", "result", ("stored", "miss", "damaged")),
                 ("replication_blocks_total", "result", ("copied", "failed")),
                 ("handed_over_blocks_total", "result", ("safe", "left")), ("tickets", "side", ("producer", "consumer")),
                 ("ticket_bytes", "side", ("producer", "consumer")),
                 ("tickets_ended_total", "end", ("acknowledged", "revoked", "deadline")),
                 ("redeemed_blocks_total", "result", ("sealed", "exists", "missed")),
                 ("ticket_pages_total", "result", ("right", "damaged")), ("data_gpu_bytes_total", "memory", ("gpu", "host")),
                 ("pulled_bytes_total", "transport", ("grpc",)), ("ticket_pages_bytes_total", "transport", ("grpc",))]
        for name, label, names in zeros:
            for value in names:
                m.set(name, 0, **{label: value})
        m.set("tier_used_bytes", (0, HOST_BYTES), tier="host")
        m.set("tier_used_bytes", (0, DISK_BYTES * 17 // 16), tier="disk")
        m.set("tier_capacity_bytes", (HOST_BYTES - (4 << 20), HOST_BYTES), tier="host")
        m.set("tier_capacity_bytes", DISK_BYTES, tier="disk")
        for tier in ("host", "disk"):
            for reason in ("capacity", "admin", "removed", "corrupt", "quota", "watermark"):
                m.set("evicted_blocks_total", 0, tier=tier, reason=reason)
        for path in ("inline", "map", "ucx"):
            for tier in ("host", "disk"):
                m.set("fetched_blocks_total", 0, path=path, tier=tier, result="hit")
            m.set("fetched_blocks_total", 0, path=path, tier="none", result="miss")
        for direction in ("in", "out"):
            for path, transport in (("inline", "grpc"), ("pages", "shm")):
                m.set("bytes_total", 0, direction=direction, path=path, transport=transport)
        m.set("bytes_total", 0, direction="out", path="map", transport="shm")
        for frm, to in (("host", "gpu"), ("gpu", "host")):
            m.set("moved_blocks_total", 0, **{"from": frm, "to": to})
        for op, stages in (("store", ("queue", "encode", "decode", "disk", "network")), ("fetch", ("disk", "transfer", "network"))):
            for stage in stages:
                m.set("stage_duration_seconds", 0, op=op, stage=stage)
        return m

    # --- What the model knows of each thing that happens. ---
    def opened(self, name):
        self.has_namespace = True
        return self.client.open_namespace(name, small_namespace(name))

    def stored(self, count, raw_bytes, stored_bytes, raw=0, namespace="n"):
        """New blocks are in memory and on disk."""
        m = self.model
        for what, added in (("blocks", count), ("bytes", stored_bytes)):
            if exposition.series(f"kvmill_namespace_stored_{what}", namespace=namespace) not in m.values:
                m.set(f"namespace_stored_{what}", 0, namespace=namespace)
            m.add(f"namespace_stored_{what}", added, namespace=namespace)
        m.add("stored_blocks_total", count, result="stored")
        m.add("stored_blocks_total", raw, result="raw")
        if exposition.series("kvmill_raw_bytes_ingested_total", format=FORMAT) not in m.values:
            m.set("raw_bytes_ingested_total", 0, format=FORMAT)
            m.set("encoded_bytes_stored_total", 0, format=FORMAT)
        m.add("raw_bytes_ingested_total", raw_bytes, format=FORMAT)
        m.add("encoded_bytes_stored_total", stored_bytes, format=FORMAT)
        for stage in ("queue", "disk"):
            m.add("stage_duration_seconds", count, op="store", stage=stage)
        for tier in ("host", "disk"):
            m.add("tier_blocks", count, tier=tier)

    def encoded(self, namespace, layers, tiles):
        """The daemon encoded so many layers of blocks, each in one piece, and with a sample interval of 1 decoded every tile."""
        m = self.model
        m.add("stage_duration_seconds", layers, op="store", stage="encode")
        m.add("stage_duration_seconds", tiles, op="store", stage="decode")
        for kind in "kv" if tiles else "":
            if exposition.series("kvmill_quantization_error_ratio", namespace=namespace, kind=kind) not in m.values:
                m.set("quantization_error_ratio", 0, namespace=namespace, kind=kind)
            m.add("quantization_error_ratio", tiles, namespace=namespace, kind=kind)

    def came(self, count, path="inline", transport="grpc", direction="in"):
        self.model.add("bytes_total", count, direction=direction, path=path, transport=transport)

    def looked_up(self, result, asked, found=0, tier="host"):
        m = self.model
        m.add("lookup_requests_total", result=result)
        m.add("lookup_blocks_total", asked)
        m.add("lookup_tokens_total", asked * TOKENS)
        m.add("hit_blocks_total", found, tier=tier)
        m.add("hit_tokens_total", found * TOKENS, tier=tier)

    def fetched(self, path, hits, misses=0, tier="host"):
        self.model.add("fetched_blocks_total", hits, path=path, tier=tier, result="hit")
        self.model.add("fetched_blocks_total", misses, path=path, tier="none", result="miss")
        if tier == "disk":
            self.model.add("tier_blocks", hits, tier="host")
            self.model.add("stage_duration_seconds", hits, op="fetch", stage="disk")

    def evicted(self, count, tier, reason, ages=None):
        self.model.add("evicted_blocks_total", count, tier=tier, reason=reason)
        self.model.add("eviction_age_seconds", count if ages is None else ages, tier=tier)
        self.model.add("tier_blocks", -count, tier=tier)

    def leases(self, count):
        m = self.model
        m.set("leases", count)
        m.set("referenced_blocks", count)
        m.set("leased_bytes", count * TILE_BLOCK)

    def fetch(self, client, ns, wanted):
        return [block.hit for block in client.fetch(ns, wanted, ns.empty(len(wanted))).blocks]


class WorkloadTest(Case):
    flags = ("--error-sample-interval", "1", "--listen", "127.0.0.1:0", "--insecure", "--ucx", "127.0.0.1")

    def test_every_counter_is_what_was_done_before_and_after_a_restart(self):
        self.compare("the start")
        self.stores()
        self.refusals_and_raw_heads()
        self.lookups_and_fetches()
        self.leases_end()
        self.tiers()
        self.over_ucx()
        self.pages_of_an_engine()
        self.removals()
        self.restart_with_damage()

    def stores(self):
        ns = self.opened("n")
        self.client.store(ns, blocks("a", 4), wait_durable=True)
        self.stored(4, 4 * RAW_BYTES, 4 * TILE_BLOCK)
        self.encoded("n", 4 * LAYERS, 4 * LAYERS * HEADS)
        self.came(4 * RAW_BYTES)
        self.compare("a store of 4 blocks")

        # The daemon may say so before everything has come, and then the rest stays away.
        self.client.store(ns, blocks("a", 4))
        key = exposition.series("kvmill_bytes_total", direction="in", path="inline", transport="grpc")
        came = self.scrape().values[key]
        self.assertTrue(self.model.values[key] <= came <= self.model.values[key] + 4 * RAW_BYTES, came)
        self.model.values[key] = came
        self.model.add("stored_blocks_total", 4, result="existing")
        self.compare("a store of the same blocks")

        # Another namespace has errors of its own.
        self.client.store(self.opened("other"), blocks("o", 1, 90), wait_durable=True)
        self.stored(1, RAW_BYTES, TILE_BLOCK, namespace="other")
        self.encoded("other", LAYERS, LAYERS * HEADS)
        self.came(RAW_BYTES)
        self.compare("a store into another namespace")

    def refusals_and_raw_heads(self):
        ns = self.opened("n")
        broken = values(50)
        broken[0][0][3, 0, 0] = np.nan
        self.assertEqual(self.client.store(ns, [kvmill.Block(b"broken block", broken)]).blocks_failed, 1)
        self.model.add("stored_blocks_total", result="rejected")
        self.came(RAW_BYTES)
        self.compare("a block that is refused")

        # The first head of the first layer is too small for a tile's scales, the others are not.
        tiny = values(51)
        tiny[0][0][:, 0, :] *= np.float16(1e-6)
        stored = self.client.store(ns, [kvmill.Block(b"block with a raw head", tiny)], wait_durable=True)
        self.assertEqual(stored.raw_heads, 1)
        self.stored(1, RAW_BYTES, page_bytes(raw_head(TOKENS), RECORD_BYTES) + TILE_PAGE, raw=1)
        self.encoded("n", LAYERS, LAYERS * HEADS - 1)
        self.came(RAW_BYTES)
        self.compare("a head that no tile holds")

        tail = [kvmill.Block(b"tail of a", values(52, 17), parent=keys("a", 4)[3], token_count=17, block_index=4)]
        self.client.store(ns, tail, wait_durable=True)
        raw_bytes = 2 * LAYERS * HEADS * 17 * HEAD_DIM * 2
        self.stored(1, raw_bytes, LAYERS * page_bytes(*[raw_head(17)] * HEADS), raw=1)
        self.encoded("n", LAYERS, 0)
        self.came(raw_bytes)
        self.compare("a tail")

    def lookups_and_fetches(self):
        ns = self.opened("n")
        self.assertEqual(self.client.lookup(ns, keys("a", 4)).hit_blocks, 4)
        self.looked_up("hit", 4, 4)
        self.assertEqual(self.client.lookup(ns, keys("a", 7)).hit_blocks, 4)
        self.looked_up("partial", 7, 4)
        self.assertEqual(self.client.lookup(ns, keys("none", 2)).hit_blocks, 0)
        self.looked_up("miss", 2)
        self.compare("lookups")

        self.assertEqual(self.fetch(self.client, ns, keys("a", 2) + keys("none", 1)), [True, True, False])
        self.fetched("inline", 2, 1)
        self.came(2 * TILE_BLOCK, direction="out")
        self.compare("a fetch")

        with self.client.map(ns, keys("a", 3) + keys("none", 1), lease=60) as mapped:
            self.assertEqual([block.hit for block in mapped.blocks], [True, True, True, False])
            self.fetched("map", 3, 1)
            self.came(3 * TILE_BLOCK, "map", "shm", "out")
            self.model.set("sessions", 1)
            self.leases(3)
            self.compare("a map")
        self.leases(0)
        self.compare("the end of a map")

    def leases_end(self):
        ns = self.opened("n")
        mapped = self.client.map(ns, keys("a", 2), lease=0.05)
        self.wait("the end of two leases", lambda values: values["kvmill_lease_expirations_total"] == 2)
        self.fetched("map", 2)
        self.came(2 * TILE_BLOCK, "map", "shm", "out")
        self.model.set("lease_expirations_total", 2)
        self.compare("leases whose time was over")
        mapped.release()
        self.compare("their end")

    def tiers(self):
        ns = self.opened("n")
        self.assertEqual(self.command("evict", "--tier", "host")["blocks"], 7)
        self.evicted(7, "host", "admin")
        self.compare("an eviction")
        self.assertEqual(self.client.lookup(ns, keys("a", 3)).hit_blocks, 3)
        self.looked_up("hit", 3, 3, tier="disk")
        self.assertEqual(self.fetch(self.client, ns, keys("a", 1)), [True])
        self.fetched("inline", 1, tier="disk")
        self.came(TILE_BLOCK, direction="out")
        self.compare("a fetch from disk")
        with self.client.map(ns, keys("a", 1, 1), lease=60):
            self.fetched("map", 1, tier="disk")
            self.came(TILE_BLOCK, "map", "shm", "out")
            self.leases(1)
            self.compare("a map from disk")
        self.leases(0)
        self.assertEqual(self.fetch(self.client, ns, keys("a", 2)), [True, True])
        self.fetched("inline", 2)
        self.came(2 * TILE_BLOCK, direction="out")
        self.compare("a fetch of what was loaded")

    def over_ucx(self):
        ns = self.opened("n")
        with kvmill.Client(self.daemon.ready["listen"], timeout=60, path=kvmill.DataPath.UCX) as remote:
            far = remote.find_namespace("n")
            self.assertEqual(self.fetch(remote, far, keys("a", 3) + keys("none", 1)), [True, True, True, False])
            transport = remote.ucx_transport
            for direction in ("in", "out"):
                self.model.set("bytes_total", 0, direction=direction, path="ucx", transport=transport)
            self.model.set("data_transport_connections", 1, transport=transport)
            self.model.set("data_connections", 1)
            self.model.set("data_hosts", 1)
            self.fetched("ucx", 2, 1)
            self.fetched("ucx", 1, tier="disk")
            self.came(3 * TILE_BLOCK, "ucx", transport, "out")
            self.model.set("stage_duration_seconds", (1, 2), op="fetch", stage="network")  # What is on disk may come later.
            self.compare("a fetch over UCX")
            # A client that is not local encodes itself: there is nothing to compare a tile with.
            remote.store(far, blocks("r", 2, 60), wait_durable=True)
            self.stored(2, 2 * RAW_BYTES, 2 * TILE_BLOCK)
            self.came(2 * LAYERS * HEADS * RECORD_BYTES, "ucx", transport)
            self.model.set("stage_duration_seconds", (1, 2), op="store", stage="network")
            self.compare("a store over UCX")
        self.model.set("data_connections", 0)
        self.model.set("data_hosts", 0)
        self.model.set("data_transport_connections", 0, transport=transport)
        self.compare("the end of the connection")
        self.assertEqual(self.fetch(self.client, ns, keys("r", 2)), [True, True])
        self.fetched("inline", 2)
        self.came(2 * TILE_BLOCK, direction="out")
        self.compare("a fetch of what came as tiles")

    def pages_of_an_engine(self):
        ns = self.opened("n")
        shape = (LAYERS, 2, ENGINE_PAGES, PAGE_TOKENS, HEADS, HEAD_DIM)
        memory = kvmill.SharedMemory(2 * int(np.prod(shape)))
        cache = memory.array(shape, np.float16, 0)
        for layer, halves in enumerate(values(70)):
            for half in range(2):
                cache[layer, half] = halves[half].reshape(ENGINE_PAGES, PAGE_TOKENS, HEADS, HEAD_DIM)
        registration = self.client.register_memory(ns, geometry(kvmill.EngineRegion.of(memory, 0)))
        self.model.set("registrations", 1)
        self.compare("a registration")
        self.client.store_pages(ns, registration, [kvmill.PageBlock(b"block of pages", [list(range(ENGINE_PAGES))])],
                                wait_durable=True)
        self.stored(1, RAW_BYTES, TILE_BLOCK)
        self.encoded("n", LAYERS, LAYERS * HEADS)
        self.came(RAW_BYTES, "pages", "shm")
        self.compare("a store of pages")
        self.client.unregister_memory(registration)
        self.model.set("registrations", 0)
        self.compare("the end of a registration")

    def removals(self):
        ns = self.opened("n")
        self.assertEqual(self.client.remove(ns, keys("r", 1)), 1)  # In both tiers: it leaves the faster one.
        self.evicted(1, "host", "removed", ages=0)
        self.model.add("tier_blocks", -1, tier="disk")
        self.assertEqual(self.client.remove(ns, [b"block with a raw head"]), 1)
        self.evicted(1, "disk", "removed", ages=0)
        self.compare("removals")

    def restart_with_damage(self):
        on_disk = self.model.values[exposition.series("kvmill_tier_blocks", tier="disk")]
        self.client.close()
        self.daemon.stop()
        for key in (keys("a", 1)[0], keys("a", 3)[2]):
            self.damage(key)
        self.daemon.start()
        self.connect()
        ns = self.opened("n")
        self.model.set("tier_blocks", on_disk, tier="disk")
        self.compare("a restart")

        found = self.fetch(self.client, ns, keys("a", 4))
        self.assertEqual(found, [False, True, False, True])
        self.fetched("inline", 2, 2, tier="disk")
        self.came(2 * TILE_BLOCK, direction="out")
        self.model.add("checksum_failures_total", 2, tier="disk")
        self.evicted(2, "disk", "corrupt", ages=0)
        self.compare("a fetch of damaged blocks")

        self.client.store(ns, [kvmill.Block(keys("a", 1)[0], values(0))], wait_durable=True)
        self.stored(1, RAW_BYTES, TILE_BLOCK)
        self.encoded("n", LAYERS, LAYERS * HEADS)
        self.came(RAW_BYTES)
        self.assertEqual(self.client.lookup(ns, keys("a", 4)).hit_blocks, 2)
        self.looked_up("partial", 4, 2)
        with self.client.map(ns, keys("a", 2), lease=60):
            self.fetched("map", 2)
            self.came(2 * TILE_BLOCK, "map", "shm", "out")
            self.model.set("sessions", 1)
            self.leases(2)
            self.compare("the same again")
        self.leases(0)
        self.command("evict", "--tier", "host")
        self.evicted(3, "host", "admin")  # Two that were loaded, one that was stored.
        self.compare("and an eviction")
        # With TLS; in a cluster; with an encrypted disk; with quotas; when something trips (guard_test).
        only_here = {"tls_certificate_end_time_seconds", "peer_info", "peer_requests_total", "peer_failures_total", "disk_key_bytes", "quota_limit_bytes", "guard_tripped"}
        unknown = [name for name in self.model.families_without() if name[len("kvmill_"):] not in only_here]
        self.assertEqual(unknown, ["kvmill_data_transport_connections"])  # Since the restart; before it was there.
        exposition.check(PROMTOOL, exposition.get(self.daemon.ready))

    def damage(self, key):
        """Flips a bit of the last page of the block, in the files that hold pages."""
        damaged = 0
        for parent, _, names in os.walk(os.path.join(self.daemon.folder, "data")):
            for name in names:
                if not name.endswith(".blob"):
                    continue
                with open(os.path.join(parent, name), "r+b") as file:
                    data = file.read()
                    header = b"KMPG\1\0" + HEADS.to_bytes(2, "little")
                    at = data.find(key)
                    while at >= 0:
                        if data[at - 32:at - 24] == header:
                            file.seek(at - 32 + 1000)
                            file.write(bytes([data[at - 32 + 1000] ^ 0x10]))
                            damaged += 1
                            break
                        at = data.find(key, at + 1)
        self.assertGreater(damaged, 0, f"{key} was not found on disk")


class CapacityTest(Case):
    """Tiers that are too small: what left them is what was stored and is not listed any more."""

    flags = ("--host-high-watermark", "100")  # What leaves leaves for a store.

    def test_blocks_that_left_are_counted_once_with_their_age(self):
        ns = self.client.open_namespace("large", kvmill.NamespaceSpec(
            groups=[kvmill.LayerGroup(range(7), 8, 128)], model="large", block_tokens=128, sink_blocks=1 << 20))
        layer = tuple(np.random.default_rng(1).standard_normal((128, 8, 128)).astype(np.float16) for _ in "kv")
        count = 40  # Of 3.5 MiB, all of them in 16 bits; an epoch of the disk tier has 4.
        for i in range(count):
            self.client.store(ns, [kvmill.Block(b"large block %d" % i, [layer] * 7)], wait_durable=True)
        self.wait("rest", lambda values: values["kvmill_unwritten_blocks"] == 0)
        listed = self.command("ls")
        values_now = self.scrape().values
        in_host = sum(entry["tier"] == "host" for entry in listed)

        def evicted(tier, reason="capacity"):
            return values_now[exposition.series("kvmill_evicted_blocks_total", tier=tier, reason=reason)]

        def age_count(tier):
            return values_now[exposition.series("kvmill_eviction_age_seconds", tier=tier)]

        self.assertEqual(values_now[exposition.series("kvmill_tier_blocks", tier="host")], in_host)
        self.assertGreater(in_host, 0)
        self.assertEqual(evicted("host"), count - in_host)
        on_disk = values_now[exposition.series("kvmill_tier_blocks", tier="disk")]
        self.assertGreater(on_disk, 0)
        self.assertLess(on_disk, count)
        self.assertEqual(evicted("disk"), count - on_disk)
        for tier in ("host", "disk"):
            self.assertEqual(age_count(tier), evicted(tier))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--promtool", required=True)
    known, rest = parser.parse_known_args()
    PROMTOOL = known.promtool
    sys.argv = [sys.argv[0], *rest]
    cli_support.main()
