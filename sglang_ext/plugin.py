"""Entry point `sglang.srt.plugins`: what ragserve adds inside SGLang's processes is registered here, and only here.

Today that is nothing but a mark that the plugin ran: strategies `full` and `prefix` are SGLang as it is. The document cache, composed
contexts and sparse attention register from here. SGLang only logs a plugin that fails, so start-up asks `loaded()`.
"""

from __future__ import annotations

_loaded = False


def register() -> None:
    """Called by SGLang once in every process, before its classes are used."""
    global _loaded
    _loaded = True


def loaded() -> bool:
    """Whether SGLang ran this plugin in this process."""
    return _loaded
