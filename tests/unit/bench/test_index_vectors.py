"""The vectors of the index benchmarks: drawn by NumPy or on a torch device, they vary alike."""

from __future__ import annotations

import numpy as np

from ragserve.bench.index_vectors import multiply, multiply_on

MANY = 40_000


def test_a_device_draws_vectors_as_numpy_does() -> None:
    shape = np.linspace(2, 0.1, 24)
    real = (np.random.default_rng(1).standard_normal((300, 24)) * shape + 1).astype(np.float32)
    real /= np.linalg.norm(real, axis=1, keepdims=True)
    ours, (theirs, _) = multiply_on("cpu", real, MANY), multiply(real, MANY)
    assert (ours.shape, ours.dtype) == (theirs.shape, np.float32)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(ours.mean(axis=0), theirs.mean(axis=0), atol=0.01)
    np.testing.assert_allclose(np.cov(ours.T), np.cov(theirs.T), atol=0.005)
    nearest = [(drawn[:2_000] @ real.T).max(axis=1).mean() for drawn in (ours, theirs)]
    assert abs(nearest[0] - nearest[1]) < 0.01
    np.testing.assert_array_equal(ours[:100], multiply_on("cpu", real, MANY)[:100])
    assert not np.array_equal(ours[:100], multiply_on("cpu", real, MANY, seed=1)[:100])
