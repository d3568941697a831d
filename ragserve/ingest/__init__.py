"""Ingestion: sources -> parsing process -> chunks -> vectors -> index, as jobs that survive the death of
their process.
"""
