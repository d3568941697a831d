"""Find passages for a question: the embedder and the retriever."""
