"""What differs between the versions of SGLang that ragserve runs on: one module for each.

All others ask this package, which has chosen by the installed version, and never for a version. Each module
defines the same names:

* ``row_of``, ``extend_span``, ``extend_end``, ``prefix_tokens``, ``protected_tokens``, ``protect``: its
  row of the request table, the tokens that a request extends, has as a prefix, and leaves to the tree.
* ``show_prefix``, ``prefix_shown``, ``restore_prefix``: slots that SGLang takes for a request's prefix.
* ``leave_tree``: unlocks a request's node in the radix tree.
* ``matched_slots``: slots that `match_prefix` has found.
* ``keep_exact``: lets a cache of SGLang's own take no answer that has sparse decode steps.
* ``resolve``, ``settings_of``: resolve SGLang's ServerArgs, and read the resolved settings.
* ``drawn``: the tokens that `Sampler._sample_from_probs` has drawn.
* ``paged_allocator``: of the CPU platform.
* ``reserve_tokens``, ``tp_group``: slots that an admission keeps free, and the group of ranks.
* ``LAYER_ARGUMENTS``, ``run_layer``: the decoder layers that can be run one by one.
* ``served_by``: lets another app be served in front of SGLang's.
* ``RELIED_ON``: methods that the module overrides or calls, with their leading parameters.
* ``WEIGHT_ENTRIES``: methods of `SchedulerWeightUpdaterManager` by which weights change in this version only.
* ``OWN_HOOKS``: hooks of this version only: target, leading parameters, function and kind.
"""

from __future__ import annotations

from importlib.metadata import version

IS_0_5_17 = version("sglang") == "0.5.17"
if IS_0_5_17:
    from sglang_ext.versions.sglang_0_5_17 import *  # noqa: F403
else:  # `hooks.check` lists what another version lacks
    from sglang_ext.versions.sglang_0_5_23 import *  # noqa: F403
