#!/usr/bin/env python3
"""How late this machine lets the most urgent program be: one that sleeps a millisecond
at a time, first of all (SCHED_FIFO), beside idle-class loops on every CPU. What it is
late by neither Dewar nor a guest can help. Usage, as root: bench/late.py [SECONDS]"""

import os
import subprocess
import sys
import time

LATE = 0.012


def late_gaps(seconds):
    end = time.monotonic() + seconds
    last, gaps = time.monotonic(), []
    while last < end:
        time.sleep(0.001)
        now = time.monotonic()
        if now - last > LATE:
            gaps.append(round((now - last) * 1e3, 1))
        last = now
    return sorted(gaps)


seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 40
loop = ["chrt", "--idle", "0", sys.executable, "-c", "while True: pass"]
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
print(f"alone: gaps over {LATE * 1e3:.0f} ms in {seconds:.0f} s: {late_gaps(seconds)}")
loops = [subprocess.Popen(loop, start_new_session=True) for _ in range(os.cpu_count())]
try:
    print(f"beside idle loops: {late_gaps(seconds)}")
finally:
    for one in loops:
        one.kill()
