#!/usr/bin/env python3
"""The main job of kvmill, once: a small model computes prompts in one process, kvmill keeps their K and V as tiles and survives
a kill -9, and another process goes on from them.

Called by deploy/quickstart.sh after the build. Needs Python only.
"""
import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time

import quickstart_values as values
from quickstart_daemons import READY_SECONDS, Cli, Daemon, Etcd, JobError, size, step, table

FORMAT = "k4v2_g128"
DEMO = ("--task", "chain-110", "--prompts", "2", "--format", FORMAT)
NODES = "ab"


def prefill(cli, *flags):
    said = cli("eval", "prefill", *DEMO, "--wait", *flags)
    print(f"{said['prompts']} prompts of task {said['task']}, {said['tokens']} tokens, computed in {said['prefill_us'] / 1000:.0f} ms; "
          f"{said['tokens_stored']} tokens, {said['blocks_stored']} blocks and {said['tail_tokens']} tokens in tails, are durable")
    if said["blocks_stored"] == 0 or said["tokens"] - said["prompts"] < said["tokens_stored"]:
        raise JobError(f"prefill stored {said['blocks_stored']} blocks, {said['tokens_stored']} of {said['tokens']} tokens")
    return said


def spill(cli, stored):
    """Everything on disk: the host tier, which dies with the daemon, is not needed any more."""
    cli("flush")
    disk = cli("stat")["tiers"]["disk"]["blocks"]
    evicted = cli("evict", "--tier", "host")["blocks"]
    print(f"{disk} blocks and tails are on disk, {evicted} of them left host memory")
    if disk < stored:
        raise JobError(f"{disk} blocks are on disk, want {stored}")


def go_on(cli, stored, tier, *flags):
    said = cli("eval", "continue", *DEMO, "--reference", *flags)
    print(f"{said['tokens_found']} of {said['tokens']} tokens found, " +
          ", ".join(f"{n} blocks from {name}" for name, n in said["tiers"].items()) +
          f"; {said['tokens_generated']} written behind them")
    if said["tokens_found"] != stored["tokens_stored"]:
        raise JobError(f"{said['tokens_found']} tokens were found, {stored['tokens_stored']} were stored")
    if list(said["tiers"]) != [tier]:
        raise JobError(f"the blocks came from {said['tiers']}, want {tier}")
    for what in ("records_sha256", "logits_sha256"):
        if said[what] != stored[what]:
            raise JobError(f"{what} is {said[what]}, and was {stored[what]} where the prompts were computed")
    return said


def excerpt(text):
    lines = text.rstrip("\n").split("\n")
    return " ".join(lines if len(lines) <= 6 else [*lines[:5], "...", lines[-1]])


def report(stored, said):
    """kvmill beside the same model over 16-bit K and V in one process."""
    count, text = said["prompts"], said["texts"][0]
    first = (said["fetch_us"] + said["recompute_us"]) / 1000
    table([["", "over fetched tiles", "over 16 bits, without kvmill"],
           ["answers right", *(f"{round(share * count)} of {count}" for share in (said["exact_match"], said["exact_match_fp16"]))],
           ["K and V of the prompts", f"{size(said['fetched_bytes'])}, {said['compression_total']:.2f} times less", size(said["raw_bytes"])],
           ["  in tiles alone", f"{stored['compression_tiles']:.2f} times less", ""],
           ["until the first token", f"{first:.1f} ms: fetch {said['fetch_us'] / 1000:.1f}, {said['tokens_recomputed']} tokens computed",
            f"{said['prefill_fp16_us'] / 1000:.1f} ms: computes {said['tokens']} tokens"],
           [f"the next {said['tokens_generated']}", f"{said['generate_us'] / 1e6:.1f} s", f"{said['generate_fp16_us'] / 1e6:.1f} s"]])
    print(f"""
The first prompt is a list in any order, and at its end where to begin and with what; the answer follows the list and counts:
  {excerpt(text['prompt'])}
and goes on, over fetched tiles ({'right' if text['right'] else 'wrong'}) and over 16 bits ({'right' if text['right_fp16'] else 'wrong'}):
  {excerpt(text['text'])}
  {excerpt(text['text_fp16'])}
Tiles and the first logits are bit by bit those of the process that computed the prompts.""")


def run_one(arguments, folder, daemon):
    """Prefill, kill -9, restart, continue."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    cli = Cli(arguments.bin_dir, daemon.socket)
    sets = values.data_sets(root)

    step(f"Start kvmilld in {folder} (a unix socket, no network)")
    seconds, ready = daemon.start()
    print(f"ready after {seconds:.2f} s, process {daemon.process.pid}, boot {ready['boot_id']}")
    step("Prefill: a small model computes prompts, their K and V go to the daemon")
    stored = prefill(cli)
    puts = [values.store(cli, data) for data in sets]
    for data, put in zip(sets, puts):
        print(f"K and V from files, {data.title}: {put['blocks_stored']} blocks are durable")
    step("Spill")
    spill(cli, stored["blocks_stored"] + sum(put["blocks_stored"] for put in puts))
    step("kill -9, and start again on the same folder")
    daemon.kill_hard()
    restart, ready_again = daemon.start()
    if ready_again["boot_id"] == ready["boot_id"]:
        raise JobError("the restarted daemon has the boot id of the killed one")
    print(f"ready after {restart:.2f} s, process {daemon.process.pid}, boot {ready_again['boot_id']}")
    step("Continue: another process fetches the tiles and writes on, attending to them as they are")
    said = go_on(cli, stored, "disk")
    results = [values.compare(cli, data, put, folder) for data, put in zip(sets, puts)]
    verify = cli("verify")
    print(f"every record on disk and in memory checked: {verify['records_checked']}, damaged: {verify['failures']}")
    step("What happened")
    print(f"""
{said['prompts']} prompts were computed and stored as tiles of 4-bit keys and 2-bit values ({FORMAT}); the daemon was killed with
SIGKILL and started again on its disk (ready after {restart:.2f} s); another process found them by their tokens and went on.
""")
    report(stored, said)
    step("What the tiles lose, value by value")
    values.report(results)
    return {"prefill": stored, "continue": said, "data_sets": results, "restart_s": restart,
            "records_checked": verify["records_checked"], "checksum_failures": verify["failures"]}


def run_two(arguments, folder, etcd, nodes):
    """Prefill on node a, continue on node b."""
    step(f"etcd and two nodes, on the loopback ({folder})")
    etcd.wait()
    clis = [Cli(arguments.bin_dir, node.socket) for node in nodes]
    for node in nodes:
        node.start()
    end = time.monotonic() + READY_SECONDS
    while any(len(cli("cluster", "members")["members"]) < len(nodes) for cli in clis):
        if time.monotonic() > end:
            raise JobError(f"the nodes do not know each other within {READY_SECONDS} s")
        time.sleep(0.1)
    print("members: " + ", ".join(member["id"] for member in clis[0]("cluster", "members")["members"]))
    # Whole blocks: a lookup finds no tails on other nodes.
    step("Prefill on node a")
    stored = prefill(clis[0], "--no-tail")
    step("Continue on node b")
    said = go_on(clis[1], stored, "peer", "--no-tail")
    step("What happened")
    print(f"""
{said['prompts']} prompts were computed on node a and stored as tiles of 4-bit keys and 2-bit values ({FORMAT}); on node b, which had
none of them, another process found them by their tokens, got them from node a, and went on.
""")
    report(stored, said)
    return {"prefill": stored, "continue": said}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin-dir", required=True)
    parser.add_argument("--cluster", action="store_true", help="two nodes: prefill on one, continue on the other")
    parser.add_argument("--etcd", default="etcd", help="the program, for --cluster")
    parser.add_argument("--keep", action="store_true", help="leave the daemon running")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    arguments = parser.parse_args()
    arguments.bin_dir = os.path.abspath(arguments.bin_dir)
    if arguments.cluster and arguments.keep:
        parser.error("--keep leaves one daemon running, not a cluster")

    folder = tempfile.mkdtemp(prefix="kvmill-quickstart-")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the clean-up below runs.
    etcd, daemons, kept = None, [], False
    try:
        if arguments.cluster:
            etcd = Etcd(arguments.etcd, folder)
            for name in NODES:
                daemons.append(Daemon(arguments.bin_dir, os.path.join(folder, name), "--cluster", f"etcd://{etcd.address}", "--node-id", name,
                                      "--listen", "127.0.0.1:0", "--insecure", "--ucx", "127.0.0.1"))
            document = run_two(arguments, folder, etcd, daemons)
        else:
            daemons.append(Daemon(arguments.bin_dir, folder))
            document = run_one(arguments, folder, daemons[0])
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=2)
                file.write("\n")
        kept = arguments.keep
    except JobError as error:
        print(f"\nquickstart: {error}", file=sys.stderr)
        return 1
    finally:
        if not kept:
            for daemon in daemons:
                daemon.stop()
            if etcd is not None:
                etcd.stop()
            shutil.rmtree(folder, ignore_errors=True)
    if kept:
        step("The daemon is still running")
        print(f"reach it:  {arguments.bin_dir}/kvmill stat --server unix:{daemons[0].socket}\n"
              f"its log:   {daemons[0].log}\n"
              f"stop it:   kill {daemons[0].process.pid} && rm -r {folder}")
    else:
        print("\nWhat was started was stopped, and its folder removed." + ("" if arguments.cluster else " (--keep leaves both)"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
