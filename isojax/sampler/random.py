"""Counter-based random bits: a pure function of a key and a counter, for NumPy and jax alike.

Threefry-2x32 with 20 rounds; Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from typing import Any

import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two words of uint32 for each counter; all four are uint32 arrays that broadcast."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            left, right = np.uint32(rotation), np.uint32(32 - rotation)
            x = x + y
            y = ((y << left) | (y >> right)) ^ x
        x = x + keys[(block + 1) % 3]
        y = y + (keys[(block + 2) % 3] + np.uint32(block + 1))
    return x, y


def sample_key(seed: int, sample: int) -> np.ndarray:
    """The key, uint32 [2], of one sample of a request with `seed` in [0, 2**64)."""
    word = lambda value: np.array([value & 0xFFFFFFFF], np.uint32)  # noqa: E731
    return np.concatenate(threefry((word(seed), word(seed >> 32)), (word(sample), word(0))))
