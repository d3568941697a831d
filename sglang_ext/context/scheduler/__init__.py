"""Admission and the stages of a composed request on the scheduler's thread."""
