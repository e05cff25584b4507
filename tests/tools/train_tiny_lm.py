#!/usr/bin/env python3
"""Trains the small model of `kvmill eval decode` from nothing, and writes what the program loads.

    apt-get install python3-torch python3-numpy
    tests/tools/train_tiny_lm.py --out trained          # 41 minutes on the machine named below
    build/release/bin/kvmill eval decode --model trained/tiny-lm.json --tasks chain-60 --methods kvarn

Writes trained/tiny-lm.bin and tiny-lm.json (weights) and golden.json (greedy outputs, for eval_decode_test), every
--save-every steps and at the end. --smoke is a few steps on short texts: whether everything runs.

The weights in tests/data/tiny-lm come from this recipe (some 71 million tokens, 7,300 steps, 41 minutes on two cores with
AMX), in several sessions with learning rates set by hand; the schedule below is those in one, and was not run to its end.
"""
import argparse
import json
import math
import os
import time

import numpy
import torch
import torch.nn.functional as functional

import tiny_lm_text as text

CONFIG = {"vocab": 64, "dim": 256, "layers": 4, "hq": 4, "hk": 1, "hd": 128, "ff": 448, "theta": 1e5, "eps": 1e-5, "maxT": 4096}
# Tokens of a text, steps, tokens of a batch, shares of retrieval and of copy.
PHASES = [(64, 700, 8192, 0.2, 0.6), (128, 1000, 8192, 0.3, 0.4), (256, 1400, 8192, 0.4, 0.2), (512, 1600, 8192, 0.5, 0.1),
          (1024, 1400, 12288, 0.5, 0.0), (2048, 1200, 16384, 0.5, 0.0)]
SMOKE = [(64, 3, 512, 0.3, 0.4), (128, 3, 512, 0.5, 0.0)]


class Model(torch.nn.Module):
    """As tests/data/tiny-lm/README.md defines it. Names of parameters are those of the file, dots as `_`."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        dim, heads = config["dim"], config["hq"] * config["hd"]
        self.tok_emb = self.matrix(config["vocab"], dim)
        self.out_norm = torch.nn.Parameter(torch.ones(dim))
        self.names = {"tok_emb": self.tok_emb}
        for i in range(config["layers"]):
            deep = 1 / math.sqrt(2 * config["layers"])
            parts = {"attn_norm": torch.nn.Parameter(torch.ones(dim)), "wqkv": self.matrix(heads + 2 * config["hd"], dim),
                     "wo": self.matrix(dim, heads, deep), "mlp_norm": torch.nn.Parameter(torch.ones(dim)),
                     "wgu": self.matrix(2 * config["ff"], dim), "wdown": self.matrix(dim, config["ff"], deep)}
            for name, parameter in parts.items():
                self.register_parameter(f"l{i}_{name}", parameter)
                self.names[f"l{i}.{name}"] = parameter
        self.names["out_norm"] = self.out_norm  # The file has them in this order.
        half = config["hd"] // 2
        angles = torch.outer(torch.arange(config["maxT"], dtype=torch.float64),
                             config["theta"] ** (-torch.arange(half, dtype=torch.float64) / half))
        self.register_buffer("cosines", angles.cos().float(), persistent=False)
        self.register_buffer("sines", angles.sin().float(), persistent=False)

    @staticmethod
    def matrix(rows, columns, scale=1.0):
        return torch.nn.Parameter(torch.randn(rows, columns) * (scale / math.sqrt(columns)))

    def norm(self, x, weight):
        x = x.float()
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["eps"]) * weight

    def turned(self, x, position):
        """RoPE. x: [batch, heads, tokens, head_dim]."""
        count, half = x.shape[2], x.shape[3] // 2
        cosines, sines = self.cosines[position:position + count], self.sines[position:position + count]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)

    def forward(self, tokens, past=None):
        """Logits. `past`: a list of (k, v) a layer, which grows by these tokens."""
        c, names = self.config, self.names
        heads, head_dim = c["hq"], c["hd"]
        rows, count = tokens.shape
        position = past[0][0].shape[2] if past else 0
        stream = functional.embedding(tokens, self.tok_emb)
        mask = torch.ones(count, position + count, dtype=torch.bool).tril(position)
        for i in range(c["layers"]):
            qkv = functional.linear(self.norm(stream, names[f"l{i}.attn_norm"]), names[f"l{i}.wqkv"]).float()
            q, k, v = qkv.split([heads * head_dim, head_dim, head_dim], -1)
            q = self.turned(q.view(rows, count, heads, head_dim).transpose(1, 2), position)
            k, v = self.turned(k.unsqueeze(1), position), v.unsqueeze(1)
            if past is not None:
                if position:
                    k, v = torch.cat([past[i][0], k], 2), torch.cat([past[i][1], v], 2)
                past[i:i + 1] = [(k, v)]
            scores = (q @ k.transpose(2, 3)).float() / math.sqrt(head_dim)
            shares = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)
            out = (shares @ v).transpose(1, 2).reshape(rows, count, heads * head_dim)
            stream = stream + functional.linear(out, names[f"l{i}.wo"])
            gate, up = functional.linear(self.norm(stream, names[f"l{i}.mlp_norm"]), names[f"l{i}.wgu"]).chunk(2, -1)
            stream = stream + functional.linear(functional.silu(gate) * up, names[f"l{i}.wdown"])
        return functional.linear(self.norm(stream, self.out_norm), self.tok_emb).float()


def rate(step, steps, most):
    """Up in 200 steps, level for half of them, then down in a line."""
    return min(most * (step + 1) / 200, most) if step < steps / 2 else most + (3e-5 - most) * (step - steps / 2) / (steps / 2)


def save(model, folder):
    os.makedirs(folder, exist_ok=True)
    tensors, offset = {}, 0
    with open(os.path.join(folder, "tiny-lm.bin"), "wb") as file:
        for name, parameter in model.names.items():
            values = parameter.detach().numpy().astype("<f2")
            tensors[name] = {"shape": list(values.shape), "offset_bytes": offset}
            offset += file.write(values.tobytes())
    header = {"config": model.config, "vocab": list(text.ALPHABET), "bin": "tiny-lm.bin", "dtype": "float16-le", "tensors": tensors}
    with open(os.path.join(folder, "tiny-lm.json"), "w", encoding="utf-8") as file:
        json.dump(header, file, indent=1)


@torch.no_grad()
def continued(model, prompt, count):
    """The greedy continuation, and the smallest distance between the best logit and the next."""
    past = []
    logits = model(torch.from_numpy(text.tokens_of(prompt))[None], past)[0, -1]
    out, margin = "", math.inf
    for _ in range(count):
        best, following = torch.topk(logits, 2).values.tolist()
        margin = min(margin, best - following)
        token = int(torch.argmax(logits))
        out += text.ALPHABET[token]
        logits = model(torch.tensor([[token]]), past)[0, -1]
    return out, margin


def golden(model, folder, retrievals, chains):
    """With the weights as the file has them: fp16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    random, samples = numpy.random.default_rng(1234), []

    def add(task, prompt, expected):
        out, margin = continued(model, prompt, len(expected))
        samples.append({"task": task, "n_prompt": len(prompt), "n_gen": len(out), "prompt": prompt, "output": out, "expected": expected,
                        "correct": out == expected, "min_top1_margin": round(margin, 4)})
    for lines, filler in retrievals:
        context, pairs = text.retrieval(random, lines, filler)
        key, value = pairs[random.integers(lines)]
        add(f"retrieval lines={lines} filler={filler}", context + key, value)
    for steps in chains:
        add(f"chain steps={steps}", *text.chain(random, [text.KEYS[i] for i in random.permutation(len(text.KEYS))[:steps]]))
    with open(os.path.join(folder, "golden.json"), "w", encoding="utf-8") as file:
        json.dump(samples, file, indent=1)
    print(f"golden: {sum(sample['correct'] for sample in samples)} of {len(samples)} right", flush=True)


def train(model, phases, arguments):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.02}, {"params": other, "weight_decay": 0.0}],
                                  lr=arguments.rate, betas=(0.9, 0.95))
    random, steps = numpy.random.default_rng(arguments.seed), sum(phase[1] for phase in phases)
    step, began = 0, time.monotonic()
    for size, count, batch_tokens, retrieval_share, copy_share in phases:
        for _ in range(count):
            tokens, weights = text.batch(random, max(1, batch_tokens // size), size + 1, retrieval_share, copy_share)
            tokens, weights = torch.from_numpy(tokens), torch.from_numpy(weights)[:, 1:]
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps, arguments.rate)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bf16):
                logits = model(tokens[:, :-1])
            losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            loss = (losses * weights.flatten()).sum() / weights.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % arguments.print_every == 0 or step == steps:
                print(f"step {step} of {steps}, {size} tokens a text, loss {loss.item():.4f}, {time.monotonic() - began:.0f} s", flush=True)
            if step % arguments.save_every == 0:
                save(model, arguments.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.3e-3, help="highest learning rate")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="products in fp32")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own")
    parser.add_argument("--print-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = Model(CONFIG)
    train(model, SMOKE if arguments.smoke else PHASES, arguments)
    save(model, arguments.out)
    if arguments.smoke:
        golden(model, arguments.out, [(5, 0)], [3])
    else:
        golden(model, arguments.out, [(12, 0), (30, 0), (60, 0), (80, 500), (100, 0), (100, 700), (150, 0), (200, 0)], [4, 12, 20, 40, 60, 80, 110])


if __name__ == "__main__":
    main()
