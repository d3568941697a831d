"""The composition root: hooks, the document cache's construction, control operations and engine launch."""
