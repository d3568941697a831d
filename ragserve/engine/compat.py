"""What a process of ours needs before it imports SGLang; also for frontend programs."""

from sglang_ext.cpu.torchvision import prepare

__all__ = ["prepare"]
