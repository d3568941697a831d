"""Answer a question from retrieved chunks: prompt, strategy choice, citations, accounting."""
