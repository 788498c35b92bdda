"""Checkpoints of a run: written whole or not at all, resumable on another mesh.

The float32 master weights and the optimizer state are stored in their global shape. Weights in
their own dtype are one cast away and are not stored. Beside them lies a JSON object with everything
else that a run needs to go on.
"""

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
        """
        args = ocp.args.Composite(position=ocp.args.JsonRestore())
        return self._manager.restore(self._existing(step), args=args)["position"]

    def restore(self, step: int | None = None) -> TrainState:
        """The state saved with a step (default: the newest), placed on the trainer's mesh.

        Raises:
          FileNotFoundError: if there is no checkpoint.
          ValueError: if it is one of another model.
        """
        args = ocp.args.Composite(state=ocp.args.StandardRestore(self._trainer.abstract_state()))
        found = self._manager.restore(self._existing(step), args=args)["state"]
        return self._trainer.from_master(*found)

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.close()

    def _existing(self, step: int | None) -> int:
        step = self.latest() if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise FileNotFoundError(f"no checkpoint of step {step} in {self._manager.directory}")
        return step
