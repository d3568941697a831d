"""The document cache's folder when no server is asked: figures, verification, removal."""

from sglang_ext.documents.folder import FolderInUse, clear, remove_texts, stat, verify

__all__ = ["FolderInUse", "clear", "remove_texts", "stat", "verify"]
