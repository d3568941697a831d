"""What one call of control operation `score` takes: bounds the message and the work of its step, for which
all other requests wait."""

from __future__ import annotations

DOCUMENT_TOKENS = 65_536  # of all its documents
SYSTEM_TOKENS = 4096
