"""Dialogues: sessions, their records and store, and what a turn reuses of earlier ones."""
