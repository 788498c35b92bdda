"""Signals are raised at once, except inside a held block."""

import hashlib
import os
import signal
import threading

import pytest

from isojax.trainer.interrupt import Interrupts


def test_a_held_block_ends_before_the_interrupt():
    done = []
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        with interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            done.append("to the end")
        done.append("never")
    assert done == ["to the end"]


def test_outside_it_is_raised_at_once():
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_second_signal_does_not_wait():
    done = []
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("never")
    assert not done


def test_a_signal_is_announced_before_its_handler_can_run(capfd):
    """As while XLA computes: the handler waits until Python has its turn, the line does not."""
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.held():
        sender = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM])
        sender.start()
        # one call into C, which no handler can leave, and which lets other threads run
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
        said = capfd.readouterr().err
        sender.join()
    assert said == "SIGTERM: stopping after this step; a second signal cuts it short\n"


def test_what_is_announced(capfd):
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "SIGINT: stopping\n"
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.held():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err.endswith("\nSIGTERM again: stopping now\n")


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
