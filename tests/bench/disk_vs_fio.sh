#!/usr/bin/env bash
# The disk tier against fio on the same file system in the same run: sequential writes with a flush
# at the end, and cold random reads of whole blocks, both past the page cache, one thread each.
# Prints every repetition, then median and spread of the ratios.
#
# Needs fio (Debian package of that name) and python3; PAGE_BYTES defaults to a page of 8 heads of
# k4v2_g128, head_dim 128 (docs/formats.md).
#
#   disk_vs_fio.sh [BENCH [DIRECTORY [BYTES [REPETITIONS [PAGES PAGE_BYTES]]]]]
set -euo pipefail
bench=${1:-build/release/bin/disk_bench}
directory=${2:-${TMPDIR:-/tmp}}
bytes=${3:-2000000000}
repetitions=${4:-5}
pages=${5:-36}
page_bytes=${6:-110912}
# fio's blocks: as large as ours, rounded up to what O_DIRECT takes.
block=$(((pages * page_bytes + 4095) / 4096 * 4096))

work=$(mktemp -d "$directory/kvmill-disk-vs-fio-XXXXXX")
trap 'rm -rf "$work"' EXIT

run_fio() {  # run_fio write|randread: GB/s
  fio --name=disk --filename="$work/fio" --size=$((bytes / block * block)) --bs=$block --rw="$1" \
    --direct=1 --ioengine=psync --end_fsync=1 --refill_buffers=0 --output-format=json |
    python3 -c 'import json, sys
job = json.load(sys.stdin)["jobs"][0]
side = job["read" if sys.argv[1] == "randread" else "write"]
print(side["bw_bytes"] / 1e9)' "$1"
}

measure_fio() {
  fio_write=$(run_fio write)
  fio_read=$(run_fio randread)
  rm -f "$work/fio"
}

# Who goes first alternates: rate-limited cloud disks let the first writer after a pause burst.
rows=()
for ((i = 0; i < repetitions; i++)); do
  if ((i % 2 == 0)); then measure_fio; fi
  ours=$("$bench" "$work/store" "$bytes" "$pages" "$page_bytes")
  if ((i % 2 == 1)); then measure_fio; fi
  rows+=("{\"fio_write\":$fio_write,\"fio_read\":$fio_read,\"ours\":$ours}")
done
printf '%s\n' "${rows[@]}" | python3 -c 'import json, statistics, sys
ratios = {"write": [], "read": []}
for line in sys.stdin:
    row = json.loads(line)
    for side in ratios:
        fio, ours = row["fio_" + side], row["ours"][side + "_gb_per_s"]
        ratios[side].append(ours / fio)
        print(f"{side:5} kvmill {ours:.3f} GB/s  fio {fio:.3f} GB/s  ratio {ours / fio:.2f}")
for side, values in ratios.items():
    print(f"{side:5} ratio median {statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}")'
