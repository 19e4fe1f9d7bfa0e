"""Resource use as the kernel reports it, of processes whose work is known; and signals."""

import os
import signal
import subprocess
import sys
import time

import pytest

from riffle.deploy.network.processes import (
    Usage,
    busy_by_core,
    defer_signals,
    interrupt_on_termination,
    read_usage,
    record_signals,
)

SPIN = """
import subprocess, sys, threading, time
def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end: pass
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile True: pass"])
print("on", flush=True)
try:
    sys.stdin.readline()
finally:
    child.kill(); child.wait()
"""


def test_a_pools_use_and_waiting_are_counted_apart_from_its_parents() -> None:
    mine = os.sched_getaffinity(0)
    with subprocess.Popen(
        [sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        os.sched_setaffinity(parent.pid, {min(mine)})
        assert parent.stdout is not None and parent.stdin is not None
        parent.stdout.readline()
        time.sleep(0.3)
        before = read_usage([parent.pid])[parent.pid]
        time.sleep(0.7)
        used = read_usage([parent.pid])[parent.pid].since(before)
        parent.stdin.write("\n")
    assert used.pool_demand > 0.8  # it ran or waited, whatever else the machine did
    assert used.pool > 0.05
    assert used.own < 0.1
    assert used.rss > 2**20
    assert used.total == used.own + used.pool


def test_an_ended_process_is_left_out() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert read_usage([gone.pid]) == {}


def test_no_processor_is_busy_for_longer_than_the_machine_is_up() -> None:
    times = busy_by_core()
    assert os.sched_getaffinity(0) <= times.keys()
    assert all(0 <= busy <= whole for busy, whole in times.values())


def test_no_time_is_no_demand() -> None:
    assert Usage(0.0).demand == 0
    assert Usage(0.0).pool_demand == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_termination_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), interrupt_on_termination():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt_on_termination():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_interrupt_is_recorded_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), record_signals() as noted:
        os.kill(os.getpid(), signal.SIGINT)
        assert noted == [signal.SIGINT]
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_waits_until_the_block_is_over() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("all")
    assert done == ["all"]
