"""Files that a reader must refuse: each builder damages one copy of a valid shard, or puts something else in its place."""

from tests.hooks.hostile import chunks, damage, descriptions, names, other_files, shapes
from tests.hooks.hostile.making import HOSTILE
from tests.hooks.hostile.other_files import compiled_plugin

__all__ = ["HOSTILE", "chunks", "compiled_plugin", "damage", "descriptions", "names", "other_files", "shapes"]
