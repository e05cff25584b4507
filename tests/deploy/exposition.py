"""What a scrape of kvmilld says, and a model of it to compare with."""
import math
import re
import subprocess
import urllib.request

SAMPLE = re.compile(r"^([a-z_]+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def get(ready, path="/metrics"):
    with urllib.request.urlopen(f"http://{ready['metrics']}{path}", timeout=60) as answer:
        return answer.read().decode()


def check(promtool, text):
    """Fails unless promtool finds the text correct and its names as Prometheus wants them."""
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and not result.stderr, f"promtool check metrics:\n{result.stderr}\n{text}"


def series(name, **labels):
    return name + "".join(f"|{key}={labels[key]}" for key in sorted(labels))


class Family:
    """One row of `kvmilld --print-metrics`."""

    def __init__(self, name, kind, labels):
        self.name, self.kind, self.labels = name, kind, labels


class Scrape:
    """Samples by series(); histograms by their family: (count, sum), once their buckets were found well-formed."""

    def __init__(self, text, families):
        self.values, buckets, sums, counts = {}, {}, {}, {}
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            name, labels, value = SAMPLE.match(line).groups()
            labels, value = dict(LABEL.findall(labels or "")), float(value)
            family = families.get(name)
            if family is None:
                family = families[re.sub("_(bucket|sum|count)$", "", name)]
                assert family.kind == "histogram", line
            bound = labels.pop("le", None)
            assert list(labels) == family.labels, f"{line}: labels, want {family.labels}"
            key = series(family.name, **labels)
            if family.kind != "histogram":
                assert key not in self.values, f"{line}: twice"
                self.values[key] = value
            elif bound is not None:
                buckets.setdefault(key, []).append((float(bound), value))
            else:
                (sums if name.endswith("_sum") else counts)[key] = value
        for key, bounds in buckets.items():
            assert bounds == sorted(bounds) and [n for _, n in bounds] == sorted(n for _, n in bounds), f"{key}: {bounds}"
            assert bounds[-1] == (math.inf, counts[key]), f"{key}: the last bucket is {bounds[-1]}, not {counts[key]}"
            low = sum(n * b for (b, _), n in zip([(0, 0), *bounds], [n - m for (_, n), (_, m) in zip(bounds, [(0, 0), *bounds])]))
            assert low <= sums[key] * 1.001 + 1e-9, f"{key}: the sum {sums[key]} is below its buckets' {low}"
            self.values[key] = counts[key]


class Model:
    """What a scrape must be: numbers, or ranges (from, to) where time or memory layout decides. Every series, and every
    family but those whose labels are not there yet, has an expectation: what is missing on either side is a difference."""

    def __init__(self, families):
        self.families, self.values = families, {}

    def set(self, name, value, **labels):
        name = "kvmill_" + name
        assert name in self.families and list(labels) == self.families[name].labels, (name, labels)
        self.values[series(name, **labels)] = value

    def add(self, name, value=1, **labels):
        key = series("kvmill_" + name, **labels)
        self.values[key] = self.values[key] + value

    def families_without(self):
        return sorted(set(self.families) - {key.split("|")[0] for key in self.values})

    def differences(self, scrape):
        for key in sorted(self.values.keys() | scrape.values.keys()):
            want, got = self.values.get(key), scrape.values.get(key)
            low, high = want if isinstance(want, tuple) else (want, want)
            if want is None or got is None or not low <= got <= high:
                yield f"{key}: {got}, want {want}"


def families_of(kvmilld, table_rows, names_in):
    said = subprocess.run([kvmilld, "--print-metrics"], capture_output=True, text=True, check=True).stdout
    families = {}
    for cells in table_rows(said):
        name = cells[0].strip("`")
        families[name] = Family(name, cells[1], names_in(cells[3]))
    assert families, "kvmilld --print-metrics has no table"
    return families
