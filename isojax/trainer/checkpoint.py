"""Checkpoints of a run: written whole or not at all, resumable on another mesh.

The float32 master weights and the optimizer state are stored in their global shape. Weights in
their own dtype are one cast away and are not stored. Beside them lies a JSON object with everything
else that a run needs to go on.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from isojax.mesh import Layout
from isojax.models.config import ModelConfig
from isojax.models.params import Parameter, Params, parameters
from isojax.numerics.policy import Policy
from isojax.trainer.optimizer import AdamW, like_state
from isojax.trainer.sharding import placements
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
    layout = Layout()
    mesh = layout.mesh(jax.devices("cpu"))
    described = parameters(model, policy, layout)
    placed = placements(model, policy, layout)

    def master(parameter: Parameter) -> jax.ShapeDtypeStruct:
        whole = NamedSharding(mesh, parameter.spec)
        return jax.ShapeDtypeStruct(parameter.shape, jnp.float32, sharding=whole)

    passed_over = jax.tree.map(lambda _: ocp.PLACEHOLDER, like_state(AdamW(), placed))
    wanted = (jax.tree.map(master, described), passed_over)
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        steps = manager.all_steps()
        if not steps or step not in (None, *steps):
            there = ", ".join(map(str, sorted(steps))) or "none"
            sought = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"no {sought} in {folder}; there are: {there}")
        step = max(steps) if step is None else step
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        weights, _ = manager.restore(step, args=args)["state"]
    return step, jax.tree.map(lambda p, m: m.astype(p.dtype), described, weights)


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
