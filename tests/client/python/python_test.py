#!/usr/bin/env python3
"""The Python package against a real daemon: calls and their arguments (ctest `python_test`):
python_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import ctypes
import gc
import inspect
import os
import unittest
import weakref

import numpy as np

import kvmill
from python_support import (HEAD_DIM, HEADS, LAYERS, TOKENS, Case, cli_support, from_bits, gaussian, relative_error, spec,
                            to_bits)


class GuardTest(unittest.TestCase):
    def test_an_engine_goes_on_in_the_format_that_loses_less(self):
        # Every tile is a sample; V of no structure loses half at 2 bits, a tenth at 4.
        daemon = cli_support.Daemon("--error-sample-interval", "1", "--guard-samples", str(LAYERS * HEADS),
                                    "--guard-action", "fall-back", "--guard-value-error", "20")
        self.addCleanup(daemon.remove)
        self.addCleanup(daemon.stop)
        with kvmill.Client(daemon.server) as client:
            wanted = spec(key_bits=4, value_bits=2)
            ns = client.open_namespace("chat", wanted, fallback=True)
            self.assertEqual(ns.name, "chat")

            def store(space, key):
                return client.store(space, [kvmill.Block(key, gaussian(1))]).blocks[0]

            self.assertEqual(store(ns, b"a").outcome, kvmill.Outcome.STORED)
            refused = store(ns, b"b")
            self.assertEqual(refused.outcome, kvmill.Outcome.FAILED)
            self.assertIsInstance(refused.error, kvmill.FailedPreconditionError)
            self.assertIn("chat~k4v4", str(refused.error))
            self.assertEqual(client.open_namespace("chat", wanted).fingerprint, ns.fingerprint)
            higher = client.open_namespace("chat", wanted, fallback=True)
            self.assertEqual((higher.name, higher.spec.key_bits, higher.spec.value_bits), ("chat~k4v4", 4, 4))
            self.assertEqual(store(higher, b"b").outcome, kvmill.Outcome.STORED)
            out = higher.empty(1)
            self.assertTrue(client.fetch(higher, [b"b"], out).blocks[0].hit)
            self.assertLess(relative_error(gaussian(1), out[0]), 0.2)


class OperationsTest(Case):
    def test_a_namespace_keeps_its_spec(self):
        wanted = spec(groups=(kvmill.LayerGroup((0, 2), 4, 128),
                              kvmill.LayerGroup((1,), 2, 64, kvmill.Attention.WINDOW, 1024)),
                      revision="r", adapter_digest="a", salt="s\u00e4", hash_scheme="h",
                      source_dtype=kvmill.DType.BFLOAT16, key_bits=2, value_bits=4, frame=kvmill.Frame.ROTATED,
                      sink_blocks=3)
        opened = self.client.open_namespace("spec", wanted)
        found = self.client.find_namespace("spec")
        self.assertEqual(found.spec, wanted)
        self.assertEqual(found.name, "spec")
        self.assertEqual(found.fingerprint, opened.fingerprint)
        self.assertEqual(len(found.fingerprint), 32)
        self.assertEqual(found.layer_count, 3)
        self.assertGreater(found.page_bytes_max(0), 4 * found.record_bytes(0))
        self.assertEqual(found.record_bytes(3), 0)
        self.assertEqual([k.shape for k, _ in found.empty(1)[0]], [(64, 4, 128), (64, 4, 128), (64, 2, 64)])
        with self.assertRaises(kvmill.NotFoundError) as caught:
            self.client.find_namespace("none")
        self.assertEqual(caught.exception.code, kvmill.Code.NOT_FOUND)
        with self.assertRaisesRegex(kvmill.FailedPreconditionError, "salt"):
            self.client.open_namespace("spec", spec(groups=wanted.groups, revision="r", adapter_digest="a"))

    def test_names_do_not_end_at_a_zero_character(self):
        for call in (lambda: self.client.open_namespace("one\0two", spec()), lambda: self.client.find_namespace("one\0two"),
                     lambda: kvmill.Client("unix:/tmp/none\0two")):
            with self.assertRaisesRegex(kvmill.InvalidArgumentError, "zero character"):
                call()

    def test_what_is_stored_is_found_fetched_and_removed(self):
        ns = self.open()
        layers = gaussian(1)
        result = self.put(ns, b"key", layers)
        self.assertEqual(result.blocks[0].outcome, kvmill.Outcome.STORED)
        self.assertEqual((result.blocks_stored, result.blocks_failed), (1, 0))
        self.assertEqual(result.raw_bytes, 2 * 2 * 2 * TOKENS * HEADS * HEAD_DIM)
        self.assertEqual(self.put(ns, b"key", layers).blocks[0].outcome, kvmill.Outcome.EXISTING)
        found = self.client.lookup(ns, [b"key", b"missing"])
        self.assertEqual((found.hit_blocks, found.hit_tokens, found.tiers), (1, TOKENS, (kvmill.Tier.HOST,)))
        out = ns.empty(2)
        fetched = self.client.fetch(ns, [b"key", b"missing"], out)
        self.assertTrue(fetched.blocks[0].hit)
        self.assertEqual((fetched.blocks[0].tier, fetched.blocks[0].token_count), (kvmill.Tier.HOST, TOKENS))
        self.assertFalse(fetched.blocks[1].hit)
        self.assertIsInstance(fetched.blocks[1].error, kvmill.NotFoundError)
        self.assertGreater(fetched.page_bytes, 0)
        self.assertTrue(0.05 < relative_error(layers, out[0]) < 0.35)
        stat = self.client.stat()
        self.assertEqual(stat.boot_id, self.client.boot_id)
        self.assertGreaterEqual(stat.blocks, 1)
        self.assertEqual(stat.tiers[0].tier, kvmill.Tier.HOST)
        self.assertGreaterEqual(self.client.flush(), 0)
        self.assertEqual(self.client.remove(ns, [b"key", b"missing"]), 1)
        self.put(ns, b"again", layers)
        self.assertEqual(self.client.clear(ns), 1)
        self.assertEqual(self.client.lookup(ns, [b"again"]).hit_blocks, 0)

    def test_a_tail_comes_back_as_it_was(self):
        ns = self.open()
        layers = gaussian(2, tokens=20)
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "a tail needs one as well"):
            self.put(ns, b"", layers, token_count=20)
        for key, values in ((b"other", gaussian(3, tokens=20)), (b"tail", layers)):
            self.assertEqual(self.put(ns, key, values, token_count=20).blocks[0].outcome, kvmill.Outcome.STORED)
        wanted = [kvmill.Tail(b"tail", tokens, 0) for tokens in range(1, TOKENS)]
        found = self.client.lookup(ns, [], tails=wanted)
        self.assertEqual((found.tail_tokens, found.tail_key), (20, kvmill.tail_key(b"", 20, b"tail")))
        self.assertEqual(self.client.lookup(ns, [], tails=wanted[:19]).tail_tokens, 0)
        for bad in (kvmill.Tail(b"", 1, 0), kvmill.Tail(b"tail", 0, 0), kvmill.Tail(b"tail", TOKENS, 0)):
            with self.assertRaises(kvmill.InvalidArgumentError):
                self.client.lookup(ns, [], tails=[bad])
        out = [tuple(np.zeros_like(a) for a in layer) for layer in layers]
        fetched = self.client.fetch(ns, [found.tail_key], [out]).blocks[0]
        self.assertEqual(fetched.token_count, 20)
        self.assertEqual(relative_error(layers, out), 0)
        short = [tuple(np.zeros((19, HEADS, HEAD_DIM), np.float16) for _ in "kv") for _ in range(LAYERS)]
        fetched = self.client.fetch(ns, [found.tail_key], [short]).blocks[0]
        self.assertIsInstance(fetched.error, kvmill.InvalidArgumentError)
        self.assertEqual(fetched.error.code, kvmill.Code.OUT_OF_RANGE)

    def test_records_and_pages(self):
        ns = self.open()
        self.put(ns, b"key", gaussian(3))
        records = [bytearray(HEADS * ns.record_bytes(layer)) for layer in range(LAYERS)]
        self.assertTrue(self.client.fetch_records(ns, [b"key"], [records]).blocks[0].hit)
        self.put(ns, b"copy", records)
        for (k, v), (copy_k, copy_v) in zip(self.get(ns, b"key"), self.get(ns, b"copy")):
            np.testing.assert_array_equal(k, copy_k)
            np.testing.assert_array_equal(v, copy_v)
        pages = [np.zeros(ns.page_bytes_max(layer), np.uint8) for layer in range(LAYERS)]
        block = self.client.fetch_pages(ns, [b"key"], [pages]).blocks[0]
        self.assertEqual(len(block.page_bytes), LAYERS)
        for page, length, record in zip(pages, block.page_bytes, records):
            self.assertEqual(page[:4].tobytes(), b"KMPG")
            self.assertIn(bytes(record[:ns.record_bytes(0)]), page[:length].tobytes())

    def test_ranks_store_their_heads_and_fetch_any(self):
        ns = self.open()
        layers = gaussian(4)
        for head in range(HEADS):
            rank = [tuple(a[:, head:head + 1] for a in layer) for layer in layers]
            result = self.client.store(ns, [kvmill.Block(b"key", rank)], head_begin=head, head_count=1)
            self.assertEqual(result.blocks[0].outcome,
                             kvmill.Outcome.STORED if head == HEADS - 1 else kvmill.Outcome.PARTIAL)
        whole = self.get(ns, b"key")
        self.assertLess(relative_error(layers, whole), 0.35)
        out = ns.empty(1, head_count=1)
        self.client.fetch(ns, [b"key"], out, head_begin=1, head_count=1)
        for (k, v), (want_k, want_v) in zip(out[0], whole):
            np.testing.assert_array_equal(k, want_k[:, 1:])
            np.testing.assert_array_equal(v, want_v[:, 1:])


class ArraysTest(Case):
    def test_strides_and_pages_lead_to_the_same_bytes(self):
        ns = self.open()
        layers = gaussian(5)
        self.put(ns, b"plain", layers)
        want = self.get(ns, b"plain")
        strided = [tuple(np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2) for a in layer) for layer in layers]
        self.put(ns, b"strided", strided)
        backwards = [tuple(np.ascontiguousarray(a[::-1])[::-1] for a in layer) for layer in layers]
        self.put(ns, b"backwards", backwards)
        # An engine's cache with heads before tokens within a page, in any order of pages.
        caches = [tuple(np.zeros((7, HEADS, 16, HEAD_DIM), np.float16) for _ in "kv") for _ in range(LAYERS)]
        pages = [5, 0, 6, 2]
        paged = [tuple(kvmill.Paged(c.transpose(0, 2, 1, 3), pages) for c in layer) for layer in caches]
        for layer, (k, v) in zip(caches, layers):
            for cache, array in zip(layer, (k, v)):
                cache[pages] = array.reshape(4, 16, HEADS, HEAD_DIM).transpose(0, 2, 1, 3)
        self.put(ns, b"paged", paged)
        for key in (b"strided", b"backwards", b"paged"):
            for got, wanted in zip(self.get(ns, key), want):
                np.testing.assert_array_equal(got[0], wanted[0])
                np.testing.assert_array_equal(got[1], wanted[1])
        for layer in caches:
            for cache in layer:
                cache[:] = 0
        self.client.fetch(ns, [b"plain"], [paged])
        for layer, wanted in zip(caches, want):
            for cache, array in zip(layer, wanted):
                np.testing.assert_array_equal(cache[pages].transpose(0, 2, 1, 3).reshape(TOKENS, HEADS, HEAD_DIM), array)
                self.assertFalse(cache[[1, 3, 4]].any(), "other pages are left alone")

    def test_bfloat16_as_bits_and_by_dlpack(self):
        ns = self.open(source_dtype=kvmill.DType.BFLOAT16)
        bits = [tuple(map(to_bits, layer)) for layer in gaussian(6)]
        self.put(ns, b"bits", bits)
        self.assertEqual(ns.empty(1)[0][0][0].dtype, np.uint16)
        want = self.get(ns, b"bits")
        self.assertLess(relative_error([tuple(map(from_bits, layer)) for layer in bits],
                                       [tuple(map(from_bits, layer)) for layer in want]), 0.35)
        packed = [tuple(OnlyDlpack(kvmill.DLPack(a, kvmill.DType.BFLOAT16)) for a in layer) for layer in bits]
        self.put(ns, b"dlpack", packed)
        out = [tuple(np.zeros_like(a) for a in layer) for layer in bits]
        packed_out = [tuple(OnlyDlpack(kvmill.DLPack(a, kvmill.DType.BFLOAT16)) for a in layer) for layer in out]
        self.assertTrue(self.client.fetch(ns, [b"dlpack"], [packed_out]).blocks[0].hit)
        for got, wanted in zip(out, want):
            np.testing.assert_array_equal(got[0], wanted[0])
            np.testing.assert_array_equal(got[1], wanted[1])
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "float16 values"):
            self.client.store(ns, [kvmill.Block(b"x", gaussian(6))])
        floats = self.client.open_namespace(self.id() + "16", spec())
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "bfloat16 values"):
            self.client.store(floats, [kvmill.Block(b"x", packed)])

    def test_types_of_ml_dtypes_are_viewed_as_bits(self):
        class MlArray:  # As ml_dtypes' arrays are: no buffer, but a view of one.
            def __init__(self, array):
                self.array = array
                self.dtype = type("dtype", (), {"name": "bfloat16"})()

            def view(self, dtype):
                assert dtype == "uint16"
                return self.array

        ns = self.open(source_dtype=kvmill.DType.BFLOAT16)
        self.put(ns, b"key", [tuple(MlArray(to_bits(a)) for a in layer) for layer in gaussian(7)])
        floats = self.client.open_namespace(self.id() + "16", spec())
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "bfloat16 values"):
            self.client.store(floats, [kvmill.Block(b"x", [tuple(MlArray(to_bits(a)) for a in layer)
                                                           for layer in gaussian(7)])])

    def test_dlpack_goes_out_without_a_copy_and_keeps_its_array(self):
        array = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
        there = np.from_dlpack(kvmill.DLPack(array, kvmill.DType.FLOAT16))
        np.testing.assert_array_equal(there, array)
        array[1, 2, 3] = -1
        self.assertEqual(there[1, 2, 3], -1)
        alive = weakref.ref(array)
        del array
        gc.collect()
        self.assertIsNotNone(alive())
        del there
        gc.collect()
        self.assertIsNone(alive())
        unused = kvmill.DLPack(np.zeros(3, np.uint16), kvmill.DType.BFLOAT16).__dlpack__()
        self.assertIn("dltensor", repr(unused))
        del unused
        with self.assertRaises(kvmill.InvalidArgumentError):
            kvmill.DLPack(np.zeros(3, np.float32), kvmill.DType.BFLOAT16).__dlpack__()

    def test_wrong_arrays_are_refused_by_name(self):
        ns = self.open()
        good = gaussian(8)

        def refused(k, text, error=kvmill.InvalidArgumentError, fetch=True):
            layers = [good[0], (k, good[1][1])]
            with self.assertRaisesRegex(error, text):
                self.client.store(ns, [kvmill.Block(b"key", layers)])
            if fetch:
                with self.assertRaisesRegex(error, text):
                    self.client.fetch(ns, [b"key"], [layers])

        k = good[1][0]
        refused(k.astype(np.float32), "block 0, layer 1: k: elements of format 'f'")
        refused(k.astype(">f2"), "format '>e'")
        refused(k[0], "2 dimensions, want 3")
        refused(k.reshape(TOKENS, 1, -1), "1 heads of 128 channels, want 2 of 64")
        refused(k.reshape(TOKENS, HEAD_DIM, HEADS), "64 heads of 2 channels")
        refused(np.zeros((TOKENS, HEADS, 2 * HEAD_DIM), np.float16)[:, :, ::2], "channels of a head must be adjacent")
        refused(np.zeros((TOKENS, HEAD_DIM, HEADS), np.float16).transpose(0, 2, 1), "channels of a head must be adjacent")
        refused(k[:TOKENS - 1], "room for 63 tokens, want 64; token_count says how many", fetch=False)
        refused(k[:0], "room for 0 tokens")
        refused(None, "NoneType", TypeError)
        refused([1, 2], "list", TypeError)
        refused((k,), "want .cache, pages.", TypeError)
        refused(kvmill.Paged(k, [0]), "3 dimensions, want 4")
        cache = np.zeros((4, 16, HEADS, HEAD_DIM), np.float16)
        refused(kvmill.Paged(cache, [0, 1, 2, 4]), "page 4, the cache has 4")
        refused(kvmill.Paged(cache, [0, 1, 2, -1]), "page -1")
        refused(kvmill.Paged(cache, [0, 1, 2]), "room for 48 tokens, want 64", fetch=False)
        refused(OnlyDlpack(k, device=2), "on a device of type 2")
        refused(OnlyDlpack(k.astype(np.float32)), "elements of 32 bits")
        refused(OnlyDlpack(k.view(np.int16)), "DLPack's type 0")
        refused(OnlyDlpack(k, broken=True), "broken", RuntimeError)
        read_only = k.copy()
        read_only.flags.writeable = False
        overlapping = np.broadcast_to(np.zeros((1, HEADS, HEAD_DIM), np.float16), (TOKENS, HEADS, HEAD_DIM))
        overlapping.flags.writeable = True
        for array, text in ((read_only, "read-only"), (overlapping, "overlap")):
            with self.assertRaisesRegex(kvmill.InvalidArgumentError, text):
                self.client.fetch(ns, [b"key"], [[good[0], (array, k)]])
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "1 layers, the namespace has 2"):
            self.client.store(ns, [kvmill.Block(b"key", good[:1])])
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "memory for 1 blocks, want 2"):
            self.client.fetch(ns, [b"key", b"other"], [good])
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "records of 5 bytes"):
            self.client.store(ns, [kvmill.Block(b"key", [b"12345", b"12345"])])
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "room for 5"):
            self.client.fetch_records(ns, [b"key"], [[bytearray(5), bytearray(5)]])
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "contiguous"):
            self.client.fetch_pages(ns, [b"key"], [[np.zeros(100, np.uint8)[::2]] * 2])
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, "writable|read-only"):
            self.client.fetch_pages(ns, [b"key"], [[b"12345", b"12345"]])
        self.assertEqual(self.client.lookup(ns, [b"key"]).hit_blocks, 0, "nothing was stored")

    def test_other_wrong_arguments(self):
        ns = self.open()
        for keys, error in (([b"x" * 65], ValueError), ([b""], ValueError), (["text"], TypeError), ([None], TypeError),
                            (3, TypeError)):
            with self.assertRaises(error):
                self.client.lookup(ns, keys)
        with self.assertRaises(ValueError):
            self.client.stat(timeout=-1)
        with self.assertRaises(ValueError):
            self.client.stat(timeout=float("nan"))
        with self.assertRaises(TypeError):
            self.client.lookup(None, [b"x"])
        with self.assertRaises(kvmill.InvalidArgumentError):
            kvmill.Client("unix:")
        with self.assertRaisesRegex(kvmill.InvalidArgumentError, 'leave out "http://"; want HOST:PORT'):
            kvmill.Client("http://localhost:1")
        with self.assertRaisesRegex(ValueError, "path 'map', want a DataPath, or one of 'auto', 'inline', 'ucx'"):
            kvmill.Client("localhost:1", path="map")
        for path in ("auto", "inline", "ucx", kvmill.DataPath.INLINE):
            kvmill.Client("localhost:1", path=path).close()
        with self.assertRaises(TypeError):
            kvmill.Client(None)
        with self.assertRaises(kvmill.InvalidArgumentError):
            self.open(block_tokens=100)
        with self.assertRaises(kvmill.InvalidArgumentError):
            self.open(model="a\0b")
        with self.assertRaises(kvmill.InvalidArgumentError):
            self.client.store(ns, [kvmill.Block(b"k", gaussian(1))], head_begin=1, head_count=2)


class OnlyDlpack:
    """An array without the buffer protocol."""

    def __init__(self, array, device=1, broken=False):
        self.array, self.device, self.broken = array, device, broken

    def __dlpack__(self):
        if self.broken:
            raise RuntimeError("broken")
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device, 0


class PackageTest(Case):
    def test_everything_public_is_documented_and_typed(self):
        self.assertTrue(os.path.exists(os.path.join(os.path.dirname(kvmill.__file__), "py.typed")))
        self.assertRegex(kvmill.__version__, r"\d+\.\d+\.\d+")
        for name in kvmill.__all__:
            thing = getattr(kvmill, name)
            self.assertTrue(thing.__doc__, name)
            for member, function in inspect.getmembers(thing, inspect.isfunction):
                if not member.startswith("_"):
                    self.assertTrue(function.__doc__ or name == "Namespace", f"{name}.{member}")
                    self.assertIn("return", function.__annotations__, f"{name}.{member}")

    def test_structs_of_dlpack_have_their_sizes(self):
        class Tensor(ctypes.Structure):
            _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                        ("byte_offset", ctypes.c_uint64)]

        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        array = np.zeros((5, 3), np.uint16)
        capsule = kvmill.DLPack(array[:, 1:], kvmill.DType.BFLOAT16).__dlpack__()
        tensor = Tensor.from_address(get(capsule, b"dltensor"))
        self.assertEqual((tensor.code, tensor.bits, tensor.lanes, tensor.ndim), (4, 16, 1, 2))
        self.assertEqual((tuple(tensor.device), tensor.byte_offset), ((1, 0), 0))
        self.assertEqual((tensor.shape[0], tensor.shape[1], tensor.strides[0], tensor.strides[1]), (5, 2, 3, 1))
        self.assertEqual(tensor.data, array.ctypes.data + 2)


if __name__ == "__main__":
    cli_support.main()
