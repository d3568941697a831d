"""Ingestion jobs: lease, runner and report."""
