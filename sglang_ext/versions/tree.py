"""``RequestTree``: SGLang's radix cache, with one way to hear of requests' KV in all versions. Subclasses
define what enters it."""

from __future__ import annotations

from sglang_ext.versions import IS_0_5_17

if IS_0_5_17:
    from sglang_ext.versions.sglang_0_5_17.finished_tree import FinishedTree as RequestTree
else:
    from sglang_ext.versions.sglang_0_5_23.checkpoint_tree import CheckpointTree as RequestTree

__all__ = ["RequestTree"]
