"""The parsing process and its parent's side."""
