"""Folders elsewhere, in S3-compatible storage and in git repositories, as sources of documents."""
