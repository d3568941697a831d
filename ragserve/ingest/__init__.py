"""Ingestion: sources -> parsing process -> chunks -> vectors -> index, as jobs that survive their process."""
