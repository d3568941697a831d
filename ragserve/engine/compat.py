"""Prepare a process for the import of SGLang; also for frontend programs."""

from sglang_ext.cpu.torchvision import prepare
from sglang_ext.process.template import start as start_template
from sglang_ext.sglang_internals.imports import without_collection

__all__ = ["prepare", "start_template", "without_collection"]
