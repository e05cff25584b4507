#!/usr/bin/env python3
"""The Python package: attention over blocks in place (ctest `python_attend_test`):
python_attend_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import numpy as np

import kvmill
from python_support import HEAD_DIM, HEADS, KEYS, LAYERS, TOKENS, MapCase, cli_support, gaussian


class AttendTest(MapCase):
    def attention(self, values, query, offset=0, window=0, scale=None, soft_cap=0.0):
        """In double, over decoded [tokens, heads, head_dim]; queries [count, query heads, head_dim]."""
        k, v = (half.astype(float) for half in values)
        tokens, heads = k.shape[:2]
        output, sums = np.zeros(query.shape), np.full(query.shape[:2], -np.inf)
        for i, q in np.ndindex(query.shape[:2]):
            end = min(tokens, tokens + offset + i + 1)
            begin = max(0, tokens + offset + i + 1 - window) if window else 0
            head = q * heads // query.shape[1]
            if begin >= end:
                continue
            logits = k[begin:end, head] @ query[i, q].astype(float) * (scale or HEAD_DIM ** -0.5)
            if soft_cap:
                logits = soft_cap * np.tanh(logits / soft_cap)
            weights = np.exp(logits)
            sums[i, q] = np.log(weights.sum())
            output[i, q] = weights / weights.sum() @ v[begin:end, head]
        return output, sums

    def assert_close(self, got, want):
        self.assertEqual((got[0].dtype, got[1].dtype), (np.float32, np.float32))
        self.assertEqual((got[0].shape, got[1].shape), (want[0].shape, want[1].shape))
        self.assertLess(np.linalg.norm(got[0] - want[0]), 3e-3 * np.linalg.norm(want[0]) + 1e-12)
        np.testing.assert_allclose(got[1], want[1], atol=3e-3)

    def test_it_is_attention_over_decoded_blocks(self):
        ns = self.fill(sink_blocks=1)
        out = ns.empty(3)
        self.client.fetch(ns, KEYS, out)
        query = np.random.default_rng(3).standard_normal((5, 2 * HEADS, HEAD_DIM)).astype(np.float32)
        with self.client.map(ns, KEYS) as mapped:
            for layer in range(LAYERS):
                whole = [np.concatenate([block[layer][half] for block in out]) for half in range(2)]
                part = [half[TOKENS:] for half in whole]
                self.assert_close(mapped.attend(layer, query), self.attention(whole, query))
                one = mapped.attend(layer, query[0])
                self.assertEqual((one[0].shape, one[1].shape), ((2 * HEADS, HEAD_DIM), (2 * HEADS,)))
                self.assert_close([a[None] for a in one], self.attention(whole, query[:1]))
                self.assert_close(mapped.attend(layer, query, first_block=1, block_count=2), self.attention(part, query))
                self.assert_close(mapped.attend(layer, query, query_offset=-5), self.attention(whole, query, -5))
                self.assert_close(mapped.attend(layer, query, window_tokens=70, query_offset=-3),
                                  self.attention(whole, query, -3, window=70))
                self.assert_close(mapped.attend(layer, query, scale=0.3, soft_cap=2.5),
                                  self.attention(whole, query, scale=0.3, soft_cap=2.5))
                self.assert_close(mapped.attend(layer, query, head_begin=1, head_count=1),
                                  self.attention([half[:, 1:] for half in whole], query))
                half = query.astype(np.float16)
                self.assert_close(mapped.attend(layer, half), self.attention(whole, half))
                # Two parts, merged with their sums, are the whole.
                (first, a), (second, b) = (mapped.attend(layer, query, first_block=0, block_count=1),
                                           mapped.attend(layer, query, first_block=1))
                total = np.logaddexp(a, b)
                merged = first * np.exp(a - total)[..., None] + second * np.exp(b - total)[..., None]
                np.testing.assert_allclose(merged, mapped.attend(layer, query)[0], atol=1e-3)
            self.assertEqual(mapped.attend(0, query[:0])[0].shape, (0, 2 * HEADS, HEAD_DIM))

    def test_a_tail_is_seen_behind_the_blocks(self):
        ns = self.fill()
        self.put(ns, b"tail", gaussian(9, tokens=20), parent=KEYS[-1], token_count=20, block_index=3)
        keys = [*KEYS, kvmill.tail_key(KEYS[-1], 20, b"tail")]
        out = ns.empty(4)
        self.assertTrue(all(block.hit for block in self.client.fetch(ns, keys, out).blocks))
        query = np.random.default_rng(5).standard_normal((3, 2 * HEADS, HEAD_DIM)).astype(np.float32)
        with self.client.map(ns, keys) as mapped:
            self.assertEqual(mapped.blocks[3].token_count, 20)
            tail = mapped.heads(3, 1)
            self.assertEqual([(head.kind, head.tokens, head.k.shape) for head in tail],
                             [(kvmill.HeadKind.RAW, 20, (20, HEAD_DIM))] * HEADS)
            np.testing.assert_array_equal(tail[1].v, out[3][1][1][:20, 1])
            whole = [np.concatenate([block[1][half] for block in out])[:3 * TOKENS + 20] for half in range(2)]
            self.assert_close(mapped.attend(1, query), self.attention(whole, query))
            self.assert_close(mapped.attend(1, query, query_offset=-2), self.attention(whole, query, -2))
            self.assert_close(mapped.attend(1, query, window_tokens=15), self.attention(whole, query, window=15))
            self.assert_close(mapped.attend(1, query, window_tokens=50), self.attention(whole, query, window=50))
            self.assert_close(mapped.attend(1, query, first_block=3),
                              self.attention([half[3 * TOKENS:] for half in whole], query))
            self.assert_close(mapped.attend(1, query, head_begin=1, head_count=1),
                              self.attention([half[:, 1:] for half in whole], query))
        with self.client.map(ns, [keys[3], keys[0]]) as mapped:
            with self.assertRaisesRegex(ValueError, "block 0 is a tail of 20 tokens: only the last block may be one"):
                mapped.attend(1, query)

    def test_wrong_queries_are_refused(self):
        ns = self.fill()
        good = np.zeros((HEADS, HEAD_DIM), np.float32)
        with self.client.map(ns, KEYS) as mapped:
            for query, fields, text in ((good[0], {}, "1 dimensions"), (good[:, :-1], {}, "want .queries, query heads, 64"),
                                        (good.astype(float), {}, "format 'd'"),
                                        (np.zeros((3, HEAD_DIM), "f4"), {}, "q_heads 3"),
                                        (good, {"query_offset": -3 * TOKENS - 1}, "query_offset -193, want -192"),
                                        (good, {"query_offset": 2 ** 63}, "query_offset 9223372036854775808, want"),
                                        (good, {"first_block": 4}, "there are 3"),
                                        (good, {"block_count": -1}, "block_count -1"),
                                        (good, {"head_begin": 1}, "head_begin 1"),
                                        (good, {"soft_cap": -1.0}, "soft_cap -1"),
                                        (good, {"window_tokens": 2 ** 32}, "window_tokens 4294967296, want 0 to 42949")):
                with self.assertRaisesRegex(ValueError, text):
                    mapped.attend(0, query, **fields)
            for arguments, fields, text in (((None, good), {}, "layer: a NoneType, want a whole number"),
                                            ((0, None), {}, "query: a NoneType, want an array"),
                                            ((0, "query"), {}, "query: a str, want an array"),
                                            ((0, good), {"head_count": 1.0}, "head_count: a float, want a whole number"),
                                            ((0, good), {"scale": "1"}, "scale: a str, want a number")):
                with self.assertRaisesRegex(TypeError, text):
                    mapped.attend(*arguments, **fields)
            with self.assertRaisesRegex(ValueError, "layer 2 of 2"):
                mapped.attend(2, good)
        with self.client.map(ns, [b"missing", *KEYS]) as mapped:
            with self.assertRaises(kvmill.NotFoundError):
                mapped.attend(0, good)
            mapped.attend(0, good, first_block=1)


if __name__ == "__main__":
    cli_support.main()
