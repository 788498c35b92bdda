"""Pools of pages and slots of one data rank: who holds what, and what is free."""

from collections.abc import Iterable


class Pool:
    """Integers [0, size), each free or held by one or more owners.

    A page that several sequences hold is full and is only read; whoever writes holds it alone.
    """

    def __init__(self, size: int) -> None:
        self._owners = [0] * size
        self._free = list(range(size - 1, -1, -1))

    @property
    def size(self) -> int:
        return len(self._owners)

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self) -> int:
        """One free entry, now held once.

        Raises:
          IndexError: if none is free.
        """
        entry = self._free.pop()
        self._owners[entry] = 1
        return entry

    def share(self, entries: Iterable[int]) -> None:
        """One more owner for each entry, all of which are held."""
        for entry in entries:
            if not self._owners[entry]:
                raise ValueError(f"entry {entry} is free and cannot be shared")
            self._owners[entry] += 1

    def drop(self, entries: Iterable[int]) -> None:
        """One owner fewer for each entry; those without owners become free."""
        for entry in entries:
            if not self._owners[entry]:
                raise ValueError(f"entry {entry} is free already")
            self._owners[entry] -= 1
            if not self._owners[entry]:
                self._free.append(entry)

    def owners(self, entry: int) -> int:
        return self._owners[entry]
