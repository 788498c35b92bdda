"""Signals are raised at once, except inside a held block."""

import signal

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


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
