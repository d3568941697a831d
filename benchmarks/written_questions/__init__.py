"""Questions that a model writes about open text, to train small models on."""
