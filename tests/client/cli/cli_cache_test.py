#!/usr/bin/env python3
"""put, get and the rest of the `kvmill` program as a user runs it, against a kvmilld of its own (ctest `cli_cache_test`).

Python only: tensors are written and read by the few lines in cli_support.py, so that kvmill's own .npy code is not
its own judge. KVMILL_EXTRA_DATA (a folder with kv/) adds real K and V of head_dim 64.
"""
import os
import signal
import stat
import struct
import sys
import time
import unittest.mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli_support as support  # noqa: E402
from cli_support import Case, Daemon, Tensor, gaussian  # noqa: E402


class WithDaemon(Case):
    """put, get and the rest against one daemon."""
    PUT_FIELDS = ["blocks_stored", "blocks_existing", "tail_tokens", "raw_bytes", "encoded_bytes",
                  "compression_tiles", "compression_total", "us"]

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon("--listen", "[::1]:0", "--admin", "127.0.0.1:0", "--insecure")
        cls.server = cls.daemon.server

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()
        cls.daemon.remove()

    def layers(self, count, tokens, heads, head_dim, seed=1):
        """K and V of some layers under a prefix of this test."""
        tensors = []
        for layer in range(count):
            pair = [gaussian(tokens, heads, head_dim, seed * 1000 + 2 * layer + kind) for kind in (0, 1)]
            for kind, tensor in zip("kv", pair):
                self.write(f"in_L{layer:02d}_{kind}.npy", tensor)
            tensors.append(pair)
        return tensors

    def put(self, name, sequence="s", *options, **how):
        # Names of one identity share their blocks; the salt keeps the tests apart.
        return self.kvmill("put", "--namespace", name, "--format", how.pop("format", "k4v2_g128"), "--sequence",
                           sequence, "--kv", self.path("in_"), "--salt", name, *options, "--json", **how)

    def get(self, name, sequence="s", *options, **how):
        return self.kvmill("get", "--namespace", name, "--sequence", sequence, "--out", self.path("out_"), *options,
                           "--json", **how)

    def fetched(self, layer, kind):
        return Tensor.read(self.path(f"out_L{layer:02d}_{kind}.npy"))

    def test_put_and_get_say_what_the_contract_lists(self):
        tensors = self.layers(3, 300, 2, 128)
        put = self.put("round-trip", "s", "--wait", "durable").json()
        self.assertEqual(list(put)[:8], self.PUT_FIELDS)
        self.assertEqual((put["blocks_stored"], put["blocks_existing"], put["tail_tokens"]), (2, 0, 44))
        self.assertEqual(put["raw_bytes"], 3 * 2 * 300 * 2 * 128 * 2)
        self.assertAlmostEqual(put["compression_tiles"], 4.74, delta=0.01)
        self.assertAlmostEqual(put["compression_total"], put["raw_bytes"] / put["encoded_bytes"], delta=1e-6)
        self.assertLess(put["compression_total"], put["compression_tiles"])

        lookup = self.kvmill("lookup", "--namespace", "round-trip", "--sequence", "s", "--json").json()
        self.assertEqual(list(lookup)[:3], ["hit_blocks", "hit_tokens", "tiers"])
        self.assertEqual((lookup["hit_blocks"], lookup["hit_tokens"], lookup["tiers"]), (2, 256, {"host": 2}))

        get = self.get("round-trip").json()
        self.assertEqual(list(get)[:6], ["blocks", "tokens", "misses", "bytes", "us", "tiers"])
        self.assertEqual((get["blocks"], get["tokens"], get["misses"], get["tiers"]), (2, 300, 0, {"host": 2}))
        for layer, (k, v) in enumerate(tensors):
            for kind, original, low, high in (("k", k, 0.05, 0.15), ("v", v, 0.3, 0.6)):
                fetched = self.fetched(layer, kind)
                self.assertEqual((fetched.shape, fetched.descr), ((300, 2, 128), "<f2"))
                self.assertTrue(low < original.relative_error(fetched, 256) < high)
                at = 2 * 256 * 2 * 128
                self.assertEqual(fetched.data[at:], original.data[at:])  # The tail, bit by bit.

    def test_get_of_tiles_decodes_to_what_get_gives(self):
        self.layers(2, 200, 3, 64)
        self.put("tiles", "s", "--sink-blocks", "1", format="k3v4_g64")
        self.get("tiles")
        said = self.kvmill("get", "--namespace", "tiles", "--sequence", "s", "--out", self.path("t_"), "--tiles",
                           "--json").json()
        self.assertEqual((said["blocks"], said["tokens"]), (3, 192))
        for layer in (0, 1):
            self.kvmill("decode", "--records", self.path(f"t_L{layer:02d}.records"), "--raw-in",
                        self.path(f"t_L{layer:02d}.raw"), "--format", "k3v4_g64", "--head-dim", 64, "--heads", 3,
                        "--k", self.path("k2.npy"), "--v", self.path("v2.npy"))
            for kind in "kv":
                decoded = Tensor.read(self.path(f"{kind}2.npy"))
                self.assertEqual(decoded.shape, (192, 3, 64))
                self.assertEqual(decoded.data, self.fetched(layer, kind).data[:len(decoded.data)])

    def test_sink_blocks_come_back_bit_by_bit(self):
        tensors = self.layers(1, 256, 1, 64)
        self.put("sink", "s", "--sink-blocks", "1")
        self.get("sink")
        size = 2 * 128 * 64
        self.assertEqual(self.fetched(0, "k").data[:size], tensors[0][0].data[:size])
        self.assertNotEqual(self.fetched(0, "k").data[size:], tensors[0][0].data[size:])

    def test_bf16_keeps_its_dtype(self):
        tensor = Tensor((130, 1, 64), b"\x80\x3f\x00\x40" * (130 * 32), "<u2")  # 1.0, 2.0
        for kind in "kv":
            self.write(f"in_L00_{kind}.npy", tensor)
        self.put("bf16", "s", "--bf16")
        self.get("bf16")
        fetched = self.fetched(0, "k")
        self.assertEqual((fetched.descr, fetched.shape), ("<u2", (130, 1, 64)))
        self.assertEqual(fetched.data[2 * 128 * 64:], tensor.data[2 * 128 * 64:])

    def test_layers_of_two_geometries_are_two_groups(self):
        first = self.layers(1, 128, 1, 64)
        pair = [gaussian(128, 2, 128, seed) for seed in (71, 72)]
        for kind, tensor in zip("kv", pair):
            self.write(f"in_L01_{kind}.npy", tensor)
        self.put("mixed")
        self.get("mixed")
        self.assertEqual(self.fetched(0, "k").shape, (128, 1, 64))
        self.assertLess(first[0][0].relative_error(self.fetched(0, "k"), 128), 0.15)
        self.assertEqual(self.fetched(1, "v").shape, (128, 2, 128))
        listed = self.kvmill("ls", "--namespace", "mixed", "--json").json()
        self.assertEqual(sorted(entry["group"] for entry in listed), [0, 1])

    def test_the_first_bytes_of_a_key_stay(self):
        self.layers(1, 256, 1, 64, seed=1)
        self.put("existing")
        self.get("existing")
        first = self.fetched(0, "k").data
        self.layers(1, 256, 1, 64, seed=2)
        again = self.put("existing").json()
        self.assertEqual((again["blocks_stored"], again["blocks_existing"]), (0, 2))
        self.assertIsNone(again["compression_tiles"])
        self.get("existing")
        self.assertEqual(self.fetched(0, "k").data, first)

    def test_another_identity_under_a_name_is_refused(self):
        self.layers(1, 128, 1, 64)
        self.put("bound", "s", "--model", "a")
        self.assertIn('model is "b" in this request and "a" at the daemon', self.put("bound", "s", "--model", "b", code=1).error)
        self.assertIn("bits", self.put("bound", "s", "--model", "a", format="k2v2_g128", code=1).error)
        self.layers(2, 128, 1, 64)
        self.put("bound", "s", "--model", "a", code=1)

    def test_misses_are_exit_code_3(self):
        self.layers(1, 256, 1, 64)
        self.put("misses")
        for command in (["lookup"], ["get", "--out", self.path("x_")], ["rm"]):
            self.kvmill(*command, "--namespace", "misses", "--sequence", "never", code=3)
            self.kvmill(*command, "--namespace", "no-such-namespace", "--sequence", "s", code=3)
        self.assertFalse(os.path.exists(self.path("x_L00_k.npy")))
        said = self.get("misses", "s", "--blocks", "5").json()
        self.assertEqual((said["blocks"], said["misses"], said["tokens"]), (2, 3, 256))
        said = self.get("misses", "s", "--blocks", "1").json()
        self.assertEqual((said["blocks"], said["misses"], said["tokens"]), (1, 0, 128))

    def test_rm_and_clear_count_and_hide(self):
        self.layers(1, 300, 1, 64)
        self.put("removal", "a")
        self.put("removal", "b")
        keys = [entry["key"] for entry in self.kvmill("ls", "--namespace", "removal", "--json").json()]
        self.assertEqual(len(keys), 6)  # Two blocks and a tail each.
        self.assertTrue(all(len(key) == 64 and key == key.lower() for key in keys))
        self.assertEqual(self.kvmill("rm", "--namespace", "removal", "--key", keys[0], "--json").json(), {"blocks": 1})
        self.assertEqual(self.kvmill("rm", "--namespace", "removal", "--sequence", "a", "--json").json()["blocks"] +
                         self.kvmill("clear", "--namespace", "removal", "--json").json()["blocks"], 5)
        self.kvmill("lookup", "--namespace", "removal", "--sequence", "b", code=3)
        self.assertEqual(self.kvmill("clear", "--namespace", "removal", "--json").json(), {"blocks": 0})
        self.put("removal", "a")
        self.layers(1, 400, 1, 64)
        self.put("removal", "a")  # The tail of 44 tokens is a part of a whole block now.
        said = self.kvmill("lookup", "--namespace", "removal", "--sequence", "a", "--json").json()
        self.assertEqual((said["hit_blocks"], said["tail_tokens"]), (3, 16))
        self.assertEqual(self.kvmill("rm", "--namespace", "removal", "--sequence", "a", "--json").json(), {"blocks": 5})
        self.assertEqual(self.kvmill("ls", "--namespace", "removal", "--json").json(), [])

    def test_flush_and_evict_move_blocks_to_disk(self):
        self.layers(1, 256, 1, 64)
        self.put("evicted")
        self.assertEqual(list(self.kvmill("flush", "--json").json()), ["blocks"])
        self.assertGreaterEqual(self.kvmill("evict", "--tier", "host", "--json").json()["blocks"], 2)
        listed = self.kvmill("ls", "--namespace", "evicted", "--json").json()
        self.assertEqual([entry["tier"] for entry in listed], ["disk", "disk"])
        self.assertEqual(self.get("evicted").json()["tiers"], {"disk": 2})
        self.assertEqual(self.get("evicted").json()["tiers"], {"host": 2})

    def test_stat_ls_and_verify_have_their_fields(self):
        self.layers(1, 128, 1, 64)
        self.put("stat")
        self.get("stat")
        said = self.kvmill("stat", "--json").json()
        self.assertEqual(list(said)[:14], ["blocks", "pages", "sessions", "leases", "tiers", "raw_bytes_ingested",
                                           "encoded_bytes_stored", "compression", "lookup_blocks", "hit_blocks",
                                           "hit_rate", "checksum_failures", "boot_id", "uptime_s"])
        for tier in ("host", "disk"):
            self.assertEqual(list(said["tiers"][tier]), ["used_bytes", "capacity_bytes", "blocks"])
        self.assertTrue(0 < said["hit_rate"] <= 1)
        self.assertEqual(said["checksum_failures"], 0)
        entry = self.kvmill("ls", "--namespace", "stat", "--json").json()[0]
        self.assertEqual(list(entry), ["namespace", "key", "group", "blocks", "tier", "bytes", "age_s", "leases"])
        verify = self.kvmill("verify", "--json").json()
        self.assertEqual(list(verify), ["records_checked", "failures"])
        self.assertGreater(verify["records_checked"], 0)
        self.assertEqual(verify["failures"], 0)

    def test_people_get_aligned_lines(self):
        self.layers(1, 300, 1, 64)
        name = ("--namespace", "human", "--sequence", "s")
        put = self.kvmill("put", "--format", "k4v2_g128", "--kv", self.path("in_"), "--salt", "human", *name).output
        self.assertIn("4.49", put)
        get = self.kvmill("get", *name, "--out", self.path("out_")).output
        self.assertIn("2 from host", get)
        outputs = [put, get, self.kvmill("lookup", *name).output, self.kvmill("stat").output,
                   self.kvmill("ls", "--namespace", "human").output, self.kvmill("quota").output, self.kvmill("verify").output,
                   self.kvmill("flush").output]
        for output in outputs:
            self.assertFalse(output.startswith(("{", "[")))
            self.assertTrue(all(line == line.rstrip() and len(line) < 140 for line in output.splitlines()))
        columns = {line.index("  ") for line in put.splitlines()}
        self.assertEqual(len({line[:max(columns) + 2].rstrip() for line in put.splitlines()}), put.count("\n"))

    def test_bench_fetch_maps_and_gives_the_leases_back(self):
        small = ("--bytes", "64KiB", "--count", "5", "--json")
        said = self.kvmill("bench", "fetch", "--path", "map", "--blocks", "8", "--clients", "3", "--depth", "2", *small).json()
        self.assertEqual((said["transport"], said["blocks"]), ("shm", 8))
        self.assertEqual(list(said["clients_gb_per_s"]), ["1", "2", "3"])
        self.assertEqual(said["gb_per_s"], said["clients_gb_per_s"]["3"])
        self.assertTrue(0 < said["p50_us"] <= said["p99_us"])
        self.assertGreater(said["empty_rpc_p50_us"], 0)
        self.assertAlmostEqual(said["raw_gb_per_s"] / said["gb_per_s"], said["raw_bytes"] / said["page_bytes"])
        after = self.kvmill("stat", "--json").json()
        self.assertEqual(after["leases"], 0)
        self.assertEqual(self.kvmill("ls", "--json").output.count("kvmill-bench"), 0)
        inline = self.kvmill("bench", "fetch", "--path", "inline", "--blocks", "20", *small).json()
        self.assertEqual((inline["transport"], list(inline["clients_gb_per_s"])), ("grpc", ["1"]))
        self.assertIn("socket", self.kvmill("bench", "fetch", "--path", "map", *small, code=1,
                                            server=self.daemon.ready["listen"]).error)

    def test_bench_store_stores_from_shared_pages(self):
        small = ("--bytes", "64KiB", "--count", "5", "--json")
        before = self.kvmill("stat", "--json").json()
        for records in ((), ("--records",)):
            said = self.kvmill("bench", "store", "--path", "map", "--clients", "2", *records, *small).json()
            self.assertEqual((said["transport"], said["blocks"]), ("shm", 1))
            self.assertEqual(list(said["clients_gb_per_s"]), ["1", "2"])
            self.assertTrue(0 < said["p50_us"] <= said["p99_us"])
            self.assertAlmostEqual(said["raw_gb_per_s"] / said["gb_per_s"], said["raw_bytes"] / said["page_bytes"])
        after = self.kvmill("stat", "--json").json()
        self.assertEqual(after["blocks"], before["blocks"])
        self.assertEqual(self.kvmill("ls", "--json").output.count("kvmill-bench"), 0)
        self.assertIn("socket", self.kvmill("bench", "store", "--path", "map", *small, code=1,
                                            server=self.daemon.ready["listen"]).error)

    def test_tcp_over_ipv6_works_and_is_no_place_for_admin(self):
        server = self.daemon.ready["listen"]
        self.assertTrue(server.startswith("[::1]:"))
        self.layers(1, 128, 1, 64)
        # Another way in may be another tenant: a name of its own.
        self.put("v6", server=server)
        self.assertEqual(self.get("v6", server=server).json()["blocks"], 1)
        for command in (["evict", "--tier", "host"], ["verify"]):
            self.assertIn("admin", self.kvmill(*command, code=1, server=server).error)
        self.kvmill("verify", server=self.daemon.ready["admin"])
        # The other way round, too.
        error = self.kvmill("stat", server=self.daemon.ready["admin"], code=1).error
        self.assertIn("its admin listener has admin commands alone; use the address of its --listen", error)

    def test_bad_prompts_fail_before_anything_is_stored(self):
        self.assertIn("L00_k.npy", self.put("bad", code=1).error)
        self.layers(2, 128, 1, 64)
        os.remove(self.path("in_L01_v.npy"))
        self.assertIn("in_L01_v.npy", self.put("bad", code=1).error)
        self.write("in_L01_v.npy", gaussian(129, 1, 64, 1))
        self.assertIn("in_L01_v.npy", self.put("bad", code=1).error)
        for kind in "kv":
            self.write(f"in_L01_{kind}.npy", gaussian(129, 1, 64, 1))
        self.assertIn("129 tokens", self.put("bad", code=1).error)
        self.kvmill("lookup", "--namespace", "bad", "--sequence", "s", code=3)

    def test_a_block_with_a_nan_fails_and_the_others_are_stored(self):
        self.layers(1, 384, 1, 64)
        tensor = gaussian(384, 1, 64, 5)
        data = bytearray(tensor.data)
        data[2 * (200 * 64 + 7):2 * (200 * 64 + 7) + 2] = struct.pack("<e", float("nan"))
        self.write("in_L00_v.npy", Tensor(tensor.shape, bytes(data), "<f2"))
        result = self.put("nan", code=1)
        self.assertIn("block 1", result.error)
        self.assertIn("channel 7", result.error)
        self.assertEqual(result.json()["blocks_failed"], 1)
        self.assertEqual(self.get("nan").json()["blocks"], 1)


class Tripped(WithDaemon):
    """Of a daemon whose guard takes no more of what loses as much as 2-bit values do."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon("--error-sample-interval", "1", "--guard-samples", "16", "--guard-value-error", "40",
                            "--guard-action", "fall-back")
        cls.server = cls.daemon.server

    def test_put_says_what_to_give_instead(self):
        self.layers(2, 1100, 2, 64)  # 4 tiles a block: it trips within the first put, at the latest at its end.
        arguments = ["put", "--kv", self.path("in_"), "--json"]
        self.kvmill(*arguments, "--namespace", "chat", "--format", "k4v2_g128", "--sequence", "a", code=None)
        refused = self.kvmill(*arguments, "--namespace", "chat", "--format", "k4v2_g128", "--sequence", "b", code=1)
        said = refused.json()
        self.assertEqual((said["blocks_stored"], said["tail_tokens"], said["blocks_failed"]), (0, 0, 9))
        self.assertIn("; give --namespace 'chat~k4v4' --format k4v4_g128", refused.error)
        self.assertNotIn("--sink-blocks", refused.error)
        people = self.kvmill(*arguments[:-1], "--namespace", "chat", "--format", "k4v2_g128", "--sequence", "b", code=1)
        self.assertRegex(people.output, r"(?m)^tail +0 tokens +not stored$")
        stored = self.kvmill(*arguments, "--namespace", "chat~k4v4", "--format", "k4v4_g128", "--sequence", "b").json()
        self.assertEqual((stored["blocks_stored"], stored["tail_tokens"]), (8, 76))


class DaemonGone(Case):
    def test_the_default_socket_is_named_with_where_else_a_daemon_may_have_it(self):
        with unittest.mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": self.path("nothing")}):
            error = self.kvmill("stat", "--timeout", "2s", code=1, server=False).error
        self.assertIn(self.path("nothing") + "/kvmill.sock", error)
        self.assertIn("unix:$XDG_RUNTIME_DIR/kvmill.sock", error)
        self.assertIn("unix:/run/kvmill/kvmill.sock", error)
        # Not where somebody said which one.
        self.assertNotIn("/run/kvmill", self.kvmill("stat", code=1, server="unix:" + self.path("none.sock")).error)

    def test_a_scheme_in_front_of_an_address_is_named(self):
        self.assertIn('leave out "http://"', self.kvmill("stat", code=2, server="http://localhost:1").error)

    def test_no_daemon_is_exit_code_1_and_says_where_it_looked(self):
        begin = time.monotonic()
        result = self.kvmill("stat", "--timeout", "2s", code=1, server="unix:" + self.path("none.sock"))
        self.assertLess(time.monotonic() - begin, 10)
        self.assertIn("kvmilld", result.error)
        self.assertEqual(result.error.count("\n"), 1)

    def test_a_stopped_daemon_does_not_hang_the_caller(self):
        daemon = Daemon()
        try:
            self.kvmill("stat", server=daemon.server)
            daemon.process.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            self.kvmill("stat", "--timeout", "500ms", code=1, server=daemon.server)
            self.assertLess(time.monotonic() - begin, 10)
            daemon.process.send_signal(signal.SIGCONT)
            self.kvmill("stat", server=daemon.server)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
            daemon.stop()
            daemon.remove()

    def test_durable_blocks_survive_kill_9_and_a_damaged_one_is_a_miss(self):
        for kind in "kv":
            self.write(f"in_L00_{kind}.npy", gaussian(128 * 8, 4, 128, 1))
        name = ("--namespace", "n", "--sequence", "s")
        daemon = Daemon()
        try:
            self.kvmill("put", *name, "--format", "k4v2_g128", "--kv", self.path("in_"), "--wait", "durable",
                        server=daemon.server)
            self.kvmill("get", *name, "--out", self.path("a_"), server=daemon.server)
            daemon.kill_hard()
            daemon.start()
            said = self.kvmill("get", *name, "--out", self.path("b_"), "--json", server=daemon.server).json()
            self.assertEqual((said["blocks"], said["misses"], said["tiers"]), (8, 0, {"disk": 8}))
            self.assertEqual(Tensor.read(self.path("a_L00_k.npy")).data, Tensor.read(self.path("b_L00_k.npy")).data)
            daemon.kill_hard()
            damage_largest_files(os.path.join(daemon.folder, "data"))
            daemon.start()
            result = self.kvmill("get", *name, "--out", self.path("c_"), "--json", server=daemon.server, code=None)
            self.assertIn(result.code, (0, 3))
            said = result.json()
            self.assertLess(said["blocks"], 8)
            self.assertGreater(said["misses"], 0)
            if said["blocks"] > 0:
                good = Tensor.read(self.path("a_L00_k.npy")).data
                self.assertTrue(good.startswith(Tensor.read(self.path("c_L00_k.npy")).data))
        finally:
            daemon.stop()
            daemon.remove()


def damage_largest_files(folder):
    """Flips a byte every 4 KiB in the second half of the files that hold the pages."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not name.endswith(".blob") or not stat.S_ISREG(os.stat(path).st_mode):
                continue
            size = os.path.getsize(path)
            with open(path, "r+b") as file:
                for at in range(size // 2, size - 1024, 4096):
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x40]))


class RealData(WithDaemon):
    """Real K and V: the repository's own, and KVMILL_EXTRA_DATA."""

    def check(self, prefix, name, head_dim, compression, tokens):
        put = self.kvmill("put", "--namespace", name, "--format", "k4v2_g128", "--sequence", "s", "--kv", prefix,
                          "--wait", "durable", "--json").json()
        self.assertAlmostEqual(put["compression_tiles"], compression, delta=0.01)
        self.assertEqual((put["blocks_stored"], put["tail_tokens"]), divmod(tokens, 128))
        self.assertEqual(self.get(name).json()["tokens"], tokens)
        layer = 0
        while os.path.exists(f"{prefix}L{layer:02d}_k.npy"):
            for kind, worst in (("k", 0.2), ("v", 0.7)):
                original = Tensor.read(f"{prefix}L{layer:02d}_{kind}.npy")
                fetched = self.fetched(layer, kind)
                self.assertEqual(fetched.shape[2], head_dim)
                self.assertTrue(0 < original.relative_error(fetched, tokens // 128 * 128) < worst)
            layer += 1
        return layer

    def test_the_repository_s_own(self):
        prefix = os.path.join(support.SOURCE_DIR, "tests/data/tiny-lm-kv/retrieval_")
        self.assertEqual(self.check(prefix, "tiny", 128, 4.74, 1918), 4)

    def test_twenty_layers_of_a_real_model(self):
        prefix = support.extra_kv_prefix()
        if prefix is None:
            self.skipTest("KVMILL_EXTRA_DATA names no folder with kv/*L00_k.npy")
        self.assertEqual(self.check(prefix, "extra", 64, 4.49, 284), 20)


# They borrow WithDaemon's helpers, not its tests.
for test in [name for name in vars(WithDaemon) if name.startswith("test_")]:
    for borrower in (RealData, Tripped):
        setattr(borrower, test, None)

if __name__ == "__main__":
    support.main()
