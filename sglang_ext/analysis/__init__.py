"""Analyses documents once, at ingestion, so that selection at query time reads neither K nor V of them."""
