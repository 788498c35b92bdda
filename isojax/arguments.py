"""What the commands' argument parsers share: short errors, and types whose errors say what is
wanted."""

import argparse
import difflib
import os
from typing import NoReturn

import jax

from isojax.mesh import Layout
from isojax.sampler.request import bad_temperature


class Parser(argparse.ArgumentParser):
    """Errors in two lines: what is wrong, and where the options are listed."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists the options\n")

    def unknown(self, word: str) -> NoReturn:
        """`error` for a word that is no argument, with the nearest option that there is."""
        options = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(word.split("=")[0], options, n=1)
        self.error(f"unknown argument {word}" + (f" (did you mean {near[0]}?)" if near else ""))


def as_layout(text: str) -> Layout:
    """A mesh, such as 8x1."""
    try:
        return Layout.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def as_temperature(text: str) -> float:
    """A sampling temperature."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a number, got {text!r}") from None
    if wrong := bad_temperature(value):
        raise argparse.ArgumentTypeError(wrong)
    return value


def provide_devices(layout: Layout) -> None:
    """Give the CPU as many devices as a mesh has, unless XLA_FLAGS says how many it has. To be
    called before jax starts its backends."""
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if layout.devices > 1 and not forced:
        jax.config.update("jax_num_cpu_devices", layout.devices)
