"""What ingestion learns of a document beside its KV, so that selecting and choosing what to recompute need
neither K nor V.
"""
