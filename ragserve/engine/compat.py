"""Prepare a process for the import of SGLang; also for frontend programs."""

from sglang_ext.cpu.torchvision import prepare

__all__ = ["prepare"]
