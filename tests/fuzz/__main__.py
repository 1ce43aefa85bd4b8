"""Fuzzing of the compiler: `python -m tests.fuzz functions --seeds 0:20000 --shard 1/4 --minutes 10`.

Exits with 1 where a result is wrong or an exception reached the user. Findings go to standard output as they come,
with the shortest program that was found, and to a file of JSON lines with --record. An interrupt (SIGINT) ends it with
what it has counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings

import torch

from tests.fuzz import campaign, functions_run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kind", choices=["functions", "ties", "specs", "sharded", "ptx", "guarded", "faults"])
    parser.add_argument("--seeds", default="0:1000", help="first:end, or new:count for seeds of this commit's own")
    parser.add_argument("--shard", default="1/1", help="number/of: every so-manieth seed")
    parser.add_argument("--minutes", type=float, help="stop after these")
    parser.add_argument("--record", help="file to which JSON lines are appended")
    parser.add_argument("--reduce", type=float, default=30.0, help="seconds for making a failing program short")
    parser.add_argument("--fault", default="", help="of `faults`: only those whose name contains this")
    parser.add_argument("--show", action="store_true", help="print the programs of the seeds and run nothing")
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    seeds = campaign.seeds_of(chosen.seeds, chosen.shard)
    if chosen.show:
        for seed in seeds:
            print(functions_run.shown(seed, tied=chosen.kind == "ties"))
        return 0
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(chosen.record, "a")) if chosen.record else None
        record = campaign.Record(chosen.kind, f"{chosen.seeds} shard {chosen.shard}", out)
        if chosen.kind == "faults":
            from tests.fuzz import faults

            return faults.measure(record, list(seeds), chosen.minutes, chosen.fault)
        if chosen.kind == "specs":
            from tests.fuzz import specs_run as runner
        elif chosen.kind == "sharded":
            from tests.fuzz import sharded_run as runner
        elif chosen.kind == "ptx":
            from tests.fuzz import ptx_run as runner
        elif chosen.kind == "guarded":
            from tests.fuzz import guarded_run as runner
        else:
            runner = functions_run
        with contextlib.suppress(KeyboardInterrupt):
            campaign.in_workers(runner, record, seeds, chosen.reduce, chosen.minutes)
        print(json.dumps(record.finish(), indent=1))
    return 1 if record.bad else 0


if __name__ == "__main__":
    sys.exit(main())
