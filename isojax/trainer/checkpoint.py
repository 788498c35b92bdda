"""Checkpoints of a run: written at once or not at all, resumable on another mesh.

Float32 master weights and optimizer state are stored whole in their global shape, every key and value
head once however many model ranks hold a copy; the weights in their dtypes are one rounding away and
are not stored. Beside them stands `RunPosition`, everything else a run needs to go on as if it had never stopped.
"""
