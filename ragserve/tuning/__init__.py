"""Verify strategies on a namespace's own documents, without labels: `ragserve tune`."""
