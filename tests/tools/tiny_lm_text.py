"""Texts that the small model of `kvmill eval decode` is trained on, one token a character.

A text is a string and a weight for each character: how much the loss counts it. 0 where it cannot be foretold.
tests/data/tiny-lm/README.md says what retrieval and chain are. The third kind, copy (a random string, then pieces of it),
is for the beginning of the training only: a model that has learnt to look back for what stood behind a few characters
learns retrieval from there, and hardly ever from nothing.
"""
import numpy

ALPHABET = "^\n abcdefghijklmnopqrstuvwxyz0123456789:?=_+-#!.,;<>()[]*/|&$@%~".ljust(64, "~")[:64]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
KEYS = [first + second for first in LETTERS for second in LETTERS]
FILLER = LETTERS + "0123456789" + 6 * " "
TOKEN_OF = numpy.zeros(128, numpy.int64)
for _token, _character in reversed(list(enumerate(ALPHABET))):
    TOKEN_OF[ord(_character)] = _token


def tokens_of(text):
    return TOKEN_OF[numpy.frombuffer(text.encode(), numpy.uint8)]


def draw(random, characters, count):
    return "".join(characters[i] for i in random.integers(0, len(characters), count))


class Builder:
    """A text that grows, with its weights."""

    def __init__(self):
        self.pieces, self.weights, self.size = [], [], 0

    def add(self, text, weights=0.0):
        self.pieces.append(text)
        self.weights.append(numpy.broadcast_to(numpy.asarray(weights, float), (len(text),)))
        self.size += len(text)

    def cut(self, size):
        """Exactly so long: cut off, or filled with what nobody asks for."""
        text, weights = "".join(self.pieces)[:size], numpy.concatenate(self.weights)[:size]
        missing = size - len(text)
        return text + "^" * missing, numpy.concatenate([weights, numpy.zeros(missing)])


def retrieval(random, lines, filler=0):
    """The context up to the question, and its (key, digits)."""
    pairs = [(KEYS[key], f"{value:05d}") for key, value in
             zip(random.permutation(len(KEYS))[:lines], random.integers(0, 100000, lines))]
    between = [""] * (lines + 1)
    while filler > 0:
        line = "#" + draw(random, FILLER, random.integers(3, 24)) + "\n"
        between[random.integers(0, lines + 1)] += line
        filler -= len(line)
    body = "".join(gap + key + value + "\n" for gap, (key, value) in zip(between, pairs))
    return "^^\n" + body + between[-1] + "ask\n", pairs


def chain(random, keys):
    """The prompt and what follows it."""
    state = int(random.integers(0, 100))
    start, operations, steps = state, [], []
    for key, following in zip(keys, keys[1:] + [".."]):
        digit, plus = int(random.integers(0, 10)), bool(random.integers(0, 2))
        state = (state + (digit if plus else -digit)) % 100
        operations.append(f"{key}{following}{digit}{'+' if plus else '-'}")
        steps.append(f"{operations[-1]}={state % 10}{state // 10}\n")
    shuffled = "".join(operations[i] + "\n" for i in random.permutation(len(operations)))
    return f"^^\n{shuffled}!!{keys[0]}!!={start % 10}{start // 10}\n", "".join(steps)


def retrieval_row(random, size):
    context = int(size * random.uniform(0.25, 0.85))
    share = random.uniform(0.05, 0.6) if random.random() < 0.4 else 0.0
    lines = min(300, max(3, int(context * (1 - share) / 8)))
    text, pairs = retrieval(random, lines, int(context * share))
    row = Builder()
    row.add(text)
    while row.size < size:
        key, value = pairs[random.integers(len(pairs))]
        row.add(key)
        row.add(value + "\n", [3, 1, 1, 1, 1, 1])  # The first digit is where the looking back happens.
    return row.cut(size)


def chain_row(random, size):
    row = Builder()
    keys = [KEYS[i] for i in random.permutation(len(KEYS))]
    while size - row.size > 60 and keys:
        most = max(2, (size - row.size - 13) // 17)
        steps = min(250, len(keys), most if random.random() < 0.5 else int(random.integers(2, most + 1)))
        prompt, answer = chain(random, keys[:steps])
        keys = keys[steps:]
        row.add(prompt)
        row.add(answer, 1.0)
    if row.size == 0:
        row.add("^")
    return row.cut(size)


def copy_row(random, size):
    length = max(16, int(size * random.uniform(0.2, 0.5)))
    source = draw(random, LETTERS + "0123456789", length)
    row = Builder()
    row.add("^^\n" + source + "\n")
    while row.size < size:
        count = int(random.integers(4, 12))
        at = int(random.integers(0, length - count))
        row.add(source[at:at + count] + "\n", [0, 0.5] + [1] * (count - 2) + [0])
    return row.cut(size)


def batch(random, rows, size, retrieval_share, copy_share):
    """Tokens [rows, size] and weights, of which the shares are retrieval and copy and the rest chains."""
    tokens, weights = numpy.zeros((rows, size), numpy.int64), numpy.zeros((rows, size), numpy.float32)
    for i in range(rows):
        place = (i + random.random()) / rows
        kind = copy_row if place < copy_share else retrieval_row if place < copy_share + retrieval_share else chain_row
        text, weights[i] = kind(random, size)
        tokens[i] = tokens_of(text)
    return tokens, weights
