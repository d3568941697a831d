"""The document cache's folder without a server: figures, verification, removal."""

from sglang_ext.documents.disk.folder import FolderInUse, clear, in_use, remove_texts, stat, verify

__all__ = ["FolderInUse", "clear", "in_use", "remove_texts", "stat", "verify"]
