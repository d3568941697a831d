"""From a question and retrieved chunks to an answer: prompt, strategy choice, citations, accounting."""
