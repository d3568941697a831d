"""The attention backend; nothing yet, see README.md."""
