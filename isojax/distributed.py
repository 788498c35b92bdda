"""Several processes that run one program, each with its own devices of one mesh.

Device programs move data between processes by themselves. What is decided on the host must be
decided alike everywhere, or the processes wait in different collectives for ever. So process 0
decides what could differ (`share`), everything else is compared (`check_same`), a request to stop
takes effect at the same `stop_here` of every process, and a process that fails or is lost ends the
others. All of this travels through jax's coordination service, which lives in process 0, and costs
a few milliseconds a call. With one process every function here returns at once.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

CLUSTERS = ("auto", "none", "slurm", "ompi", "mpi4py", "k8s")
# joined without being asked to, when the launcher says that there are several processes
_AUTOMATIC = {"slurm": "SLURM_NTASKS", "ompi": "OMPI_COMM_WORLD_SIZE"}

LOST_AFTER_S = 60.0  # without a sign of life a process counts as lost
_BEAT_S = 1.0  # between signs of life
_SILENT_S = 6.0  # the same after a failure, when a lost process is the likely cause
_MEET_S = 20.0  # before a process says that it waits for the others to start
_ARRIVE_S = 30.0  # how long processes wait for each other at the end
_FOREVER_MS = 7 * 24 * 3600 * 1000  # a lost process is noticed by the watch, not by a timeout


class MismatchError(RuntimeError):
    """Processes of one run disagree on what must be the same."""


def index() -> int:
    """This process's number; 0 with one process."""
    return _state().process_id


def count() -> int:
    """How many processes there are."""
    return _state().num_processes


def first() -> bool:
    """Whether this process is the one that writes files and prints."""
    return index() == 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `join`."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--cluster",
        choices=CLUSTERS,
        default="auto",
        help="launcher that says how many processes there are and where (default: auto, which "
        "knows slurm and ompi; none starts one process whatever the launcher says)",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, with a port that is free there"
    )
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="number of this one, from 0")
    group.add_argument(
        "--lost-after",
        type=float,
        default=LOST_AFTER_S,
        metavar="SECONDS",
        help=f"without a sign of life a process counts as lost (default: {LOST_AFTER_S:g})",
    )


def join(
    cluster: str = "auto",
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    lost_after: float = LOST_AFTER_S,
) -> None:
    """Meet the other processes. Call it before anything that asks jax for devices.

    coordinator, processes, process: all three, or those that the launcher does not know. See
    `add_arguments`. Without them and without a launcher of several processes this does nothing.

    Raises:
      ValueError: what is given does not say where the processes are.
      RuntimeError: they did not meet.
    """
    global _watch
    asked = not (coordinator is None and processes is None and process is None)
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [name for name, value in given.items() if value is None]
    launcher = _launcher(cluster)
    if processes is not None and not 0 <= (process or 0) < processes:
        raise ValueError(f"--process {process} is not within 0 and --processes {processes}")
    if launcher is None and missing:
        if not asked:
            return
        raise ValueError(
            "several processes need --coordinator, --processes and --process, "
            f"or a launcher (--cluster); --{', --'.join(missing)} is not given"
        )
    # its handler of SIGTERM would stand beside ours, and its step counter is orbax's
    jax.config.update("jax_enable_preemption_service", False)
    detection = launcher if missing else "deactivate"
    # jax aborts the process when the others have not come within five minutes: say so before
    waiting = threading.Timer(_MEET_S, _say_waiting)
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            # jax knows Kubernetes without a name for it
            cluster_detection_method=None if detection == "k8s" else detection,
            heartbeat_timeout_seconds=max(100, round(2 * lost_after)),
        )
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"the processes did not meet at {_state().coordinator_address}: {_line(error)}"
        ) from None
    finally:
        waiting.cancel()
    if count() > 1:
        _watch = _Watch(lost_after)
        _watch.start()


def check_mesh(mesh: Mesh) -> None:
    """A mesh of several processes has every device of each: a process without one would be left
    behind.

    Raises:
      ValueError: if it has not.
    """
    if count() > 1 and mesh.size != jax.device_count():
        raise ValueError(
            f"the mesh has {mesh.size} devices, but {count()} processes have {jax.device_count()} "
            "between them, and every one must be used"
        )


def exchange(text: str) -> list[str]:
    """What each process passes in, in their order. All must call it, at the same point."""
    if count() == 1:
        return [text]
    client, number = _state().client, next(_exchanges)
    folder = f"isojax/exchange/{number}"
    client.key_value_set(f"{folder}/{index()}", text)
    client.wait_at_barrier(folder, _FOREVER_MS)
    if number:  # whoever is here has read the exchange before
        client.key_value_delete(f"isojax/exchange/{number - 1}/{index()}")
    return [text for _, text in sorted(_read(folder).items())]


def share[T](make: Callable[[], T]) -> T:
    """What process 0 makes, on every process: a JSON value. Only process 0 calls `make`."""
    if count() == 1:
        return make()
    return json.loads(exchange(json.dumps(make()) if first() else "")[0])


def check_same(what: str, *parts: str | bytes | np.ndarray) -> None:
    """Every process holds the same parts, to the last bit.

    Raises:
      MismatchError: naming the processes that differ from process 0, and the lines, if it is text.
    """
    if count() == 1:
        return
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        data = data if isinstance(data, bytes) else data.tobytes() + str(data.dtype).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    digests = exchange(digest.hexdigest())
    others = [str(i) for i, found in enumerate(digests) if found != digests[0]]
    if not others:
        return
    message = f"{what} of process {', '.join(others)} differ from those of process 0"
    if len(parts) == 1 and isinstance(parts[0], str):
        texts = [text.splitlines() for text in exchange(parts[0])]
        one = texts[int(others[0])]
        pairs = itertools.zip_longest(texts[0], one, fillvalue="nothing")
        different = [f"{a} (process {others[0]}: {b})" for a, b in pairs if a != b]
        message += ": " + "; ".join(different[:5])
    raise MismatchError(message)


def ask_to_stop() -> None:
    """Ask all processes to stop at their next common `stop_here`. Safe in a signal handler."""
    if _watch is not None:
        _watch.asked = True


def stop_here() -> bool:
    """Whether all processes are to stop at this call, because one was asked to.

    Every process makes the same calls. Between the request and the stop lie at most a few seconds
    and one call.
    """
    return _watch is not None and _watch.stop_here()


def arrive() -> bool:
    """Whether every process has come to its end, so that they can still do something together.

    False if one failed, was lost, or does not come within half a minute. Asked once: later calls
    give the same answer.
    """
    return _watch is None or _watch.arrive()


def leave(status: int) -> int:
    """The end of a run that all processes come to; gives back the exit status."""
    if _watch is not None:
        _watch.leave()
        jax.distributed.shutdown()
    return status


def fail(message: str, status: int) -> int:
    """The end of a run that went wrong, here or everywhere: print, and let the others know.

    With several processes this ends the process, since a process that lacks its peers cannot be
    wound up in order; with one it gives back the exit status.
    """
    if _watch is None:
        print(f"error: {message}", file=sys.stderr)
        return status
    _watch.fail(message, status)


def advise(hint: str) -> None:
    """What to add to the message when a process is lost, such as how to go on."""
    if _watch is not None:
        _watch.hint = hint


class _Watch(threading.Thread):
    """Gives signs of life, and looks for those of the others, for failures and requests to stop.

    jax's own heartbeat, which has the longer timeout, aborts the process without advice.
    """

    def __init__(self, lost_after: float) -> None:
        super().__init__(name="isojax-watch", daemon=True)
        self.asked = False
        self.hint = ""
        self._lost_after = lost_after
        self._client = _state().client
        self._others = [i for i in range(count()) if i != index()]
        self._beats = itertools.count()
        self._seen = {i: ("", time.monotonic()) for i in self._others}
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._calls = 0
        self._stop_at: int | None = None
        self._arrived: bool | None = None

    def run(self) -> None:
        try:
            while not self._ended.wait(_BEAT_S):
                entries = self._look()
                self._end_if_lost(entries)
                if self.asked and f"stop/{index()}" not in entries:
                    self._set("stop")
                if self._stop_at is None and any(key.startswith("stop/") for key in entries):
                    self._agree_on_stop()
        except jax.errors.JaxRuntimeError as error:
            if not self._ended.is_set():
                self._end(f"process 0, which coordinates the others, was lost: {_line(error)}")

    def _set(self, kind: str, value: str = "") -> None:
        self._client.key_value_set(f"isojax/watch/{kind}/{index()}", value, allow_overwrite=True)

    def _look(self) -> dict[str, str]:
        """A sign of life, and what all processes have said: {"kind/process": value}."""
        self._set("alive", str(next(self._beats)))
        entries = dict(self._client.key_value_dir_get("isojax/watch/"))
        entries = {key.removeprefix("isojax/watch/"): value for key, value in entries.items()}
        now = time.monotonic()
        for i in self._others:
            beat = entries.get(f"alive/{i}", "")
            if beat != self._seen[i][0]:
                self._seen[i] = (beat, now)
        return entries

    def _lost(self, entries: dict[str, str], seconds: float) -> str | None:
        """Which processes have given no sign of life for so long, and have not left."""
        now = time.monotonic()
        silent = [
            str(i)
            for i, (_, seen) in self._seen.items()
            if now - seen > seconds and not {f"left/{i}", f"failed/{i}"} & entries.keys()
        ]
        if not silent:
            return None
        return f"process {', '.join(silent)} was lost: no sign of life for {seconds:g} s"

    def _trouble(self, entries: dict[str, str], seconds: float) -> str | None:
        """What has happened to another process."""
        failed = [
            f"process {i} failed: {entries[f'failed/{i}']}"
            for i in self._others
            if f"failed/{i}" in entries
        ]
        return failed[0] if failed else self._lost(entries, seconds)

    def _end_if_lost(self, entries: dict[str, str]) -> None:
        trouble = self._trouble(entries, self._lost_after)
        if trouble and not self._ended.is_set():
            self._end(trouble)

    def _end(self, message: str) -> NoReturn:
        """The main thread may be in a collective that will never end."""
        _say(message, self.hint)
        os._exit(1)

    def _agree_on_stop(self) -> None:
        """Choose the first call of `stop_here` that no process has made yet.

        Meanwhile no process gets out of that call; each has this thread to answer for it, so a
        process that waits for another one's device does no harm.
        """
        with self._lock:
            self._set("at", str(self._calls))
            while True:
                entries = self._look()
                calls = [int(v) for key, v in entries.items() if key.startswith("at/")]
                if len(calls) == count():
                    self._stop_at = max(calls) + 1
                    return
                self._end_if_lost(entries)
                if self._ended.wait(0.1):
                    return

    def stop_here(self) -> bool:
        with self._lock:
            self._calls += 1
            return self._calls == self._stop_at

    def arrive(self) -> bool:
        if self._arrived is None:
            self._arrived = self._wait_for_all()
        return self._arrived

    def _wait_for_all(self) -> bool:
        try:
            self._set("arrived")
            deadline = time.monotonic() + _ARRIVE_S
            while time.monotonic() < deadline:
                entries = self._look()
                if sum(key.startswith("arrived/") for key in entries) == count():
                    return True
                if self._trouble(entries, _SILENT_S):
                    return False
                time.sleep(0.2)
        except jax.errors.JaxRuntimeError:  # process 0 is gone
            pass
        return False

    def leave(self) -> None:
        self._ended.set()
        self._set("left")

    def fail(self, message: str, status: int) -> NoReturn:
        self._ended.set()
        _say(message, self.hint)
        try:
            self._set("failed", message)
            # process 0 must outlive the others' next look; and the cause may be a lost process
            deadline = time.monotonic() + _SILENT_S + 2 * _BEAT_S
            while time.monotonic() < deadline:
                time.sleep(_BEAT_S)
                entries = self._look()
                if lost := self._lost(entries, _SILENT_S):
                    _say(lost, self.hint)
                    break
                if all(f"failed/{i}" in entries for i in self._others):
                    break
        except jax.errors.JaxRuntimeError:
            _say("process 0, which coordinates the others, is gone", self.hint)
        finally:
            sys.stdout.flush()
            os._exit(status)


_watch: _Watch | None = None
_exchanges = itertools.count()


def _state() -> Any:
    from jax._src import distributed  # the public API does not hand out the client

    return distributed.global_state


def _read(folder: str) -> dict[int, str]:
    """{process: value} of a folder of keys."""
    entries = _state().client.key_value_dir_get(folder + "/")
    return {int(key.rpartition("/")[2]): value for key, value in entries}


def _launcher(cluster: str) -> str | None:
    """The launcher to ask, as jax names it."""
    if cluster != "auto":
        return None if cluster == "none" else cluster
    for name, size in _AUTOMATIC.items():
        if int(os.environ.get(size, "1")) > 1 and _detects(name):
            return name
    return None


def _detects(name: str) -> bool:
    from jax._src.clusters import ClusterEnv  # what `jax.distributed.initialize` asks

    return any(env.name == name and env.is_env_present() for env in ClusterEnv._cluster_types)


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _say_waiting() -> None:
    where = _state().coordinator_address
    print(f"process {index()} waits for the others at {where}", file=sys.stderr, flush=True)


def _say(message: str, hint: str) -> None:
    parts = [f"error: process {index()}: {message}", *([hint] if hint else [])]
    print("; ".join(parts), file=sys.stderr, flush=True)
