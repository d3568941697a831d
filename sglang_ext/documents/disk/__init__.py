"""The disk tier of documents' KV."""
