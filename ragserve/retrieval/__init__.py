"""From a question to passages: the embedder and the retriever."""
