"""Answer quality: exact match and token F1 over question sets, and where answers are lost."""
