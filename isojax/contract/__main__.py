"""`python -m isojax.contract`: the contract command by itself."""

import sys

from isojax.contract.cli import main

sys.exit(main(["contract", *sys.argv[1:]]))
