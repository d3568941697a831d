"""The runtime behind the product."""

from ragserve.engine.base import (
    Engine,
    EngineInfo,
    EngineTimings,
    EngineUsage,
    GenerateChunk,
    GenerateRequest,
    Sampling,
)

__all__ = [
    "Engine",
    "EngineInfo",
    "EngineTimings",
    "EngineUsage",
    "GenerateChunk",
    "GenerateRequest",
    "Sampling",
]
