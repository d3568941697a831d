"""How good the answers are: exact match and token F1 over question sets, and where they are lost."""
