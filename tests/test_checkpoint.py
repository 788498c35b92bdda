"""A damaged checkpoint is found, named, and got round by way of an older one."""

import shutil
from contextlib import closing

import pytest

from isojax.trainer.checkpoint import CheckpointError, Checkpoints, newest_position
from tests.test_trainer import host, start, trainer_of
from tests.util import assert_same_bits


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with checkpoints 3 and 5."""
    folder, trainer = tmp_path_factory.mktemp("whole"), trainer_of("dense", "1x1")
    saved, state = Checkpoints(folder, trainer), start(trainer)
    for step in (3, 5):
        saved.save(step, state, {"step": step})
    saved.close()
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "checkpoints")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest(folder):
    return max((path for path in folder.rglob("d/*")), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: flip(largest(state)),  # which the storage's own readers let pass
        lambda state: largest(state).unlink(),
        lambda state: (state / "manifest.ocdbt").write_bytes(b""),
        lambda state: (state / "_METADATA").write_text("{"),
    ],
    ids=["a flipped bit", "no data", "no manifest", "no tree"],
)
def test_a_damaged_state_is_named_and_an_older_one_serves(folder, damage):
    trainer = trainer_of("dense", "1x1")
    damage(folder / "5" / "state")
    with closing(Checkpoints(folder, trainer)) as found, pytest.raises(CheckpointError) as error:
        found.restore()
    first, last = str(error.value).splitlines()
    assert first.startswith(f"checkpoint {folder / '5'} is damaged: state: ")
    assert last.startswith(f"older ones: 3; to go on from 3, move {folder / '5'} out of")
    (folder / "5").rename(folder.parent / "5")  # as the message says
    with closing(Checkpoints(folder, trainer)) as found:
        assert found.position() == {"step": 3}
        assert_same_bits(host(found.restore()), host(start(trainer)))


@pytest.mark.parametrize("text", ["", "{", '{"step": 7}', "[5]", None])
def test_a_damaged_position_is_named(folder, text):
    path = folder / "5" / "position" / "metadata"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with closing(Checkpoints(folder, trainer_of("dense", "1x1"))) as found:
        with pytest.raises(CheckpointError, match="5 is damaged: position/metadata: "):
            found.position()
    shutil.rmtree(folder / "3")
    with pytest.raises(CheckpointError, match="there is no older one"):
        newest_position(folder)


def test_a_checkpoint_of_another_model_is_not_called_damaged(folder):
    with closing(Checkpoints(folder, trainer_of("moe", "1x1"))) as found:
        with pytest.raises(ValueError, match="5 is one of another model"):
            found.restore()


def test_the_newest_position(folder, tmp_path):
    assert newest_position(folder) == {"step": 5}
    assert newest_position(tmp_path / "absent") is None
    assert not (tmp_path / "absent").exists()
