"""Checkpoints of a run: written whole or not at all, resumable on another mesh.

The float32 master weights and the optimizer state are stored in their global shape. Weights in
their own dtype are one cast away and are not stored. Beside them lies a JSON object with everything
else that a run needs to go on, and sums of both: a bit that has flipped on a disk is found.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.models.params import Params, parameters
from isojax.numerics.policy import Policy
from isojax.trainer.step import Trainer, TrainState


class CheckpointError(RuntimeError):
    """A checkpoint is damaged; the message says which, and how to go on from an older one."""


def load_weights(
    folder: Path, model: ModelConfig, policy: Policy, step: int | None = None
) -> tuple[int, Params]:
    """The weights in a folder that `Checkpoints` wrote, in their dtypes, in the host's memory.

    step: whose (default: the newest). Reads the master weights alone, and changes nothing in the
    folder, where a run may be at work. Returns the step and the weights.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: it is one of another model.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    steps = sorted(ocp.utils.checkpoint_steps(folder.absolute()))
    if not steps or step not in (None, *steps):
        sought = "checkpoint" if step is None else f"checkpoint of step {step}"
        there = ", ".join(map(str, steps)) or "none"
        raise FileNotFoundError(f"no {sought} in {folder}; there are: {there}")
    step = steps[-1] if step is None else step
    path = folder.absolute() / str(step) / "state"
    described = parameters(model, policy, Layout())
    here = SingleDeviceSharding(jax.devices("cpu")[0])
    wanted = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=here), described
    )
    with closing(ocp.PyTreeCheckpointHandler()) as handler:
        stored, optimizer = handler.metadata(path).tree
        if differing := sorted(set(_shapes(wanted)) ^ set(_shapes(stored))):
            raise ValueError(f"{path.parent} is not a checkpoint of this model: {differing[0]}")
        tree = (wanted, jax.tree.map(lambda _: ocp.PLACEHOLDER, optimizer))
        restore = ocp.checkpoint_utils.construct_restore_args(tree)
        args = ocp.args.PyTreeRestore(tree, restore_args=restore)
        weights, _ = handler.restore(path, args=args)
    return step, jax.tree.map(lambda p, m: m.astype(p.dtype), described, weights)


def _shapes(tree: Any) -> Iterator[str]:
    """Each array's place in the tree and its shape."""
    for place, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield f"{jax.tree_util.keystr(place)} {list(leaf.shape)}"


class Checkpoints:
    """The checkpoints of one run folder, newest last.

    keep: how many are kept. Saving runs in the background; `close` waits for it.

    Of several processes each writes and reads its own shards: all make the same calls, and the
    folder is one that all of them see.
    """

    def __init__(self, folder: Path, trainer: Trainer, *, keep: int = 2) -> None:
        self._trainer = trainer
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: TrainState, position: dict[str, Any]) -> None:
        """Save after `step` steps; `position` is a JSON object. One that exists is kept."""
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave((state.master, state.optimizer)),
            position=ocp.args.JsonSave(position),
            sums=ocp.args.JsonSave(
                {"state": _sums((state.master, state.optimizer)), "position": _digest(position)}
            ),
        )
        self._manager.save(step, args=args)
        if jax.default_backend() == "cpu":
            # the writer reads a CPU array in place, and the next update would overwrite it
            self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """The newest step saved, or None."""
        return self._manager.latest_step()

    def position(self, step: int | None = None) -> dict[str, Any]:
        """The JSON object saved with a step (default: the newest).

        Raises:
          FileNotFoundError: if there is no checkpoint.
          CheckpointError: if it is damaged.
        """
        return _position(self._manager, self._existing(step))

    def restore(self, step: int | None = None) -> TrainState:
        """The state saved with a step (default: the newest), placed on the trainer's mesh.

        Raises:
          FileNotFoundError: if there is no checkpoint.
          ValueError: if it is one of another model.
          CheckpointError: if it is damaged.
        """
        step = self._existing(step)
        like = self._trainer.abstract_state()
        saved = _json(self._manager, step, "sums").get("state")
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        try:
            found = self._manager.restore(step, args=args)["state"]
        except (PermissionError, MemoryError, jax.errors.JaxRuntimeError):
            raise  # nothing is wrong with the checkpoint
        except Exception as error:  # its readers raise ValueError, OSError, Exception itself...
            if _shapes_differ(self._manager.directory / str(step) / "state", like):
                raise ValueError(
                    f"checkpoint {self._manager.directory / str(step)} is one of another model"
                ) from None
            raise _damaged(self._manager, step, "state", error) from None
        if _sums(found) != saved:
            raise _damaged(self._manager, step, "state", "its bits are not those that were saved")
        return self._trainer.from_master(*found)

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.close()

    def _existing(self, step: int | None) -> int:
        step = self.latest() if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise FileNotFoundError(f"no checkpoint of step {step} in {self._manager.directory}")
        return step


def newest_position(folder: Path) -> dict[str, Any] | None:
    """The JSON object of the newest checkpoint in a folder of them; None where there is none.

    Raises:
      CheckpointError: if it is damaged.
    """
    if not folder.is_dir():
        return None
    options = ocp.CheckpointManagerOptions(create=False)  # nor does it write: a look only
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        step = manager.latest_step()
        return None if step is None else _position(manager, step)


def _position(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    found = _json(manager, step, "position")
    if _digest(found) != _json(manager, step, "sums").get("position"):
        name = "position/metadata"
        raise _damaged(manager, step, name, "its bits are not those that were saved")
    return found


def _json(manager: ocp.CheckpointManager, step: int, name: str) -> dict[str, Any]:
    """A JSON object of a checkpoint."""
    try:
        return dict(
            manager.restore(step, args=ocp.args.Composite(**{name: ocp.args.JsonRestore()}))[name]
        )
    except PermissionError:
        raise
    except Exception as error:
        raise _damaged(manager, step, f"{name}/metadata", error) from None


def _digest(position: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(position, sort_keys=True).encode()).hexdigest()


def _sums(state: Any) -> list[int]:
    """Of every array the sum of its words as integers, modulo 2^32: the same on every mesh."""
    return [int(total) for total in jax.device_get(_word_sums(jax.tree.leaves(state)))]


@jax.jit
def _word_sums(arrays: list[jax.Array]) -> list[jax.Array]:
    words = [jax.lax.bitcast_convert_type(array, jnp.uint32) for array in arrays]
    return [jnp.sum(word, dtype=jnp.uint32) for word in words]


def _shapes_differ(state: Path, like: Any) -> bool:
    """Whether what is stored has other shapes, so far as that can be read."""
    try:
        stored = ocp.StandardCheckpointHandler().metadata(state).tree
        shapes = sorted(tuple(array.shape) for array in jax.tree.leaves(stored))
    except Exception:
        return False
    return shapes != sorted(tuple(array.shape) for array in jax.tree.leaves(like))


def _damaged(
    manager: ocp.CheckpointManager, step: int, part: str, cause: Exception | str
) -> CheckpointError:
    at = manager.directory / str(step)
    if isinstance(cause, Exception):
        lines = str(cause).splitlines()
        cause = f"{type(cause).__name__}: {lines[0][:200] if lines else ''}"
    older = sorted((s for s in manager.all_steps() if s < step), reverse=True)
    if older:
        how = (
            f"older ones: {', '.join(map(str, older))}; to go on from {older[0]}, move {at} out of "
            "its folder and --resume again"
        )
    else:
        how = "there is no older one"
    return CheckpointError(f"checkpoint {at} is damaged: {part}: {cause}\n{how}")
